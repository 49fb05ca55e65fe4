"""How a server is set up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerSettings:
    """Limits are of the whole server unless said otherwise.

    served_names         what /v1/models lists, and a request may name; the first is in answers
    max_queue            prompts that wait for their first token before others are answered 429
    max_output_tokens    no completion gets more tokens, whatever it asks for
    max_body             bytes of a request's body
    drain_timeout        seconds that requests get to end when the server is asked to stop
    health_timeout       seconds without a word of the engine after which /health is 503
    write_timeout        seconds for which a client may take nothing before its request is ended
    profile_dir          where traces go; None: no profile routes
    front_processes      that share the port and the engine
    """

    served_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_queue: int = 4096
    max_output_tokens: int | None = None
    max_body: int = 32 * 2**20
    drain_timeout: float = 30.0
    health_timeout: float = 10.0
    write_timeout: float = 120.0
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    log_format: str = "text"
    log_prompts: bool = False
    profile_dir: str | None = None
    front_processes: int = 1
