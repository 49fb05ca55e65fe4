"""/start_profile and /stop_profile: traces of the engine's steps, into a folder that the operator has named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from rapid_infer.errors import RequestError
from rapid_infer.server.errors import ApiError, invalid
from rapid_infer.server.http import Exchange
from rapid_infer.server.schema import ProfileRequest
from rapid_infer.server.served import Served

if TYPE_CHECKING:
    from rapid_infer.server.routes import Handler


async def start_profile(served: Served, exchange: Exchange) -> None:
    data = await exchange.body(served.settings.max_body)
    body = exchange.decode(data, ProfileRequest) if data.strip() else ProfileRequest()
    if body.num_steps is not None and body.num_steps < 1:
        raise invalid("num_steps", f"num_steps must be at least 1, got {body.num_steps}")
    prefix = body.profile_prefix or "rapid_infer"
    if not re.fullmatch(r"\w[\w.-]{0,99}", prefix):
        raise invalid("profile_prefix", "profile_prefix must be a file name of letters, digits, '_', '.' and '-'")
    folder = _below(Path(served.settings.profile_dir or ""), body.output_dir or "")
    try:
        await served.llm.start_profile(folder, prefix, body.num_steps)
    except RequestError as error:
        raise ApiError(409, str(error)) from None
    await exchange.respond_json({"status": "profiling", "output_dir": str(folder)})


async def stop_profile(served: Served, exchange: Exchange) -> None:
    """Answers when the trace is on disk."""
    try:
        path = await served.llm.stop_profile()
    except RequestError as error:
        raise ApiError(409, str(error)) from None
    await exchange.respond_json({"status": "stopped", "path": path})


def _below(root: Path, name: str) -> Path:
    """The folder `name` inside of `root`; ApiError when it would lie elsewhere."""
    root = root.resolve()
    folder = (root / name).resolve()
    if not folder.is_relative_to(root):
        raise invalid("output_dir", "output_dir must lie below the folder of --profile-dir")
    return folder


PROFILE_ROUTES: dict[str, dict[str, Handler]] = {
    "/start_profile": {"POST": start_profile},
    "/stop_profile": {"POST": stop_profile},
}
