"""`rapid-infer serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rapid_infer.cli import options
from rapid_infer.errors import ConfigError

API_KEY = "RAPID_INFER_API_KEY"


@options.expand(
    engine_args=(
        *("tensor_parallel_size", "dtype", "device", "load_format", "quantization", "kv_cache_dtype", "max_model_len"),
        *(
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "enforce_eager",
            "model_plugin",
            "model_impl",
            "hub",
            "revision",
        ),
    )
)
def serve(
    *,
    model: options.Model = "demo",
    host: Annotated[str, typer.Option(help="Where to listen. 0.0.0.0: on all interfaces; set an API key then.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0: any free port, which is printed.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; repeat for several. Default: MODEL.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"A file with an API key in each line. Default: the key in ${API_KEY}, or none.")
    ] = None,
    tool_parser: Annotated[
        str, typer.Option(help="auto (by the model), none, hermes, qwen3_coder, deepseek, or one that is installed.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="auto (by the model), none, think, or one that is installed.")
    ] = "auto",
    max_output_tokens: Annotated[
        int | None, typer.Option(help="No completion gets more, whatever it asks for.", min=1)
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Completions that may wait beyond --max-num-seqs; further ones are answered 429.", min=0)
    ] = 4096,
    max_body_mb: Annotated[int, typer.Option(help="Size of a request's body, in MiB.", min=1)] = 32,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that requests get to end after SIGTERM.", min=0)] = 30.0,
    health_timeout: Annotated[
        float, typer.Option(help="Seconds of silence of the engine after which /health is 503.", min=1)
    ] = 30.0,
    front_processes: Annotated[
        str, typer.Option(help="Processes that speak HTTP and text, over one engine; auto: one for every 4 cores.")
    ] = "auto",
    log_format: Annotated[str, typer.Option(help="text, or json: an object in each line.")] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", metavar="", help="Prompts go to the log too.")] = False,
    profile_dir: Annotated[
        Path | None, typer.Option(help="Turn on /start_profile and /stop_profile; traces go into this folder.")
    ] = None,
    engine_args: dict[str, Any],
    offline: options.Offline = False,
) -> int:
    """Serve a model over HTTP, as OpenAI does. Example: rapid-infer serve Qwen/Qwen3-8B --port 8000

    Then: curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" -d
    '{"messages": [{"role": "user", "content": "Hello"}]}'

    Any OpenAI client works with base URL http://127.0.0.1:8000/v1, and a browser shows a page to chat at
    http://127.0.0.1:8000/. /health, /ready and /metrics are for machines. SIGTERM lets requests end first.
    docs/serving.md lists every field.
    """
    options.go_offline(offline)
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format must be text or json, got {log_format!r}")
    try:
        from rapid_infer.server.run import serve as run
        from rapid_infer.server.settings import ServerSettings
    except ImportError as error:
        raise ConfigError(f"serve needs {error.name}: pip install 'rapid-infer[serve]'") from error
    settings = ServerSettings(
        served_names=tuple(served_model_name or [model]),
        host=host,
        port=port,
        api_keys=read_keys(api_key_file),
        max_queue=max_queue,
        max_output_tokens=max_output_tokens,
        max_body=max_body_mb * 2**20,
        drain_timeout=drain_timeout,
        health_timeout=health_timeout,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        log_format=log_format,
        log_prompts=log_prompts,
        profile_dir=None if profile_dir is None else str(profile_dir.resolve()),
        front_processes=read_fronts(front_processes),
    )
    return run(model, engine_args, settings)


def read_fronts(text: str) -> int:
    """ConfigError for what is no number from 1 to 64."""
    if text == "auto":
        from rapid_infer.server.supervisor import auto_fronts

        return auto_fronts()
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise ConfigError(f"--front-processes must be auto or a number from 1 to 64, got {text!r}")
    return int(text)


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The keys that clients must have; none: everyone may. ConfigError, which tells no key."""
    if file is None:
        key = os.environ.get(API_KEY, "")
        if key != key.strip() or (API_KEY in os.environ and not key):
            raise ConfigError(f"${API_KEY} is empty or has white space around the key; set it to the key, or unset it")
        return (key,) if key else ()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"--api-key-file {file} holds no key; expected one in each line")
    return keys
