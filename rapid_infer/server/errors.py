"""What a request can fail with, in OpenAI's shape."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rapid_infer.errors import RequestError

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error. `param` names the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, message: str) -> ApiError:
    """A 400 about the field `param`."""
    return ApiError(400, message, param=param)


def of_request_error(error: RequestError, names: frozenset[str], default: str) -> ApiError:
    """A 400 about the field that the engine's message begins with, else about `default`."""
    text = str(error)
    first = re.split(r"[^\w]", text, maxsplit=1)[0]
    return invalid(first if first in names else default, text)


def of_decode_error(error: Exception) -> ApiError:
    """A 400 that names the field at which a body is not what the schema says."""
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        message, _, path = text.partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        missing = re.search(r"missing required field `(\w+)`", message)
        if missing is not None:
            field = f"{field}.{missing[1]}" if field else missing[1]
        name = re.split(r"[.\[]", field, maxsplit=1)[0] or "body"
        return invalid(name, f"{field or 'the body'}: {message[:1].lower()}{message[1:]}")
    if isinstance(error, RecursionError):
        return invalid("body", "the body is nested too deeply")
    return invalid("body", f"the body is not valid JSON: {text}")
