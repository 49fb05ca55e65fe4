"""Values that users give: numbers of other libraries become Python's, and types are what the annotations say."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "text", NoneType: "None"}

PLAIN = frozenset(_NAMES)
"""Types of which a value needs no `plain`."""


def plain(value: Any) -> Any:
    """`value`, and what it holds, with the scalars and arrays of numpy and torch as numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not set(map(type, value)) <= {int, str}:
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else value
    return value


def check_text(name: str, text: str, error: type[Exception]) -> None:
    """`error` for halves of a surrogate pair, which no UTF-8 has: tokenizers, files and sockets refuse them."""
    try:
        text.encode()
    except UnicodeEncodeError as reason:
        raise error(
            f"{name} has the lone surrogate {text[reason.start]!a} at character {reason.start}, which is no text: "
            'expected valid Unicode; text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") repairs it'
        ) from None


def check_fields(options: Any, error: type[Exception]) -> None:
    """Check every field of a frozen dataclass against its annotation; `error` names the first that is wrong.

    Texts must be ones that can be sent to another process.
    """
    for name, kind in get_type_hints(type(options)).items():
        value = plain(getattr(options, name))
        if isinstance(value, str):
            check_text(name, value, error)
            if not value:
                raise error(f"{name} must be {_describe(kind)}, got an empty one")
        try:
            value = msgspec.convert(value, kind)
            if isinstance(value, dict):
                msgspec.msgpack.encode(value)
        except (msgspec.ValidationError, UnicodeEncodeError):
            raise error(f"{name} must be {_describe(kind)}, got {value!r:.80}") from None
        object.__setattr__(options, name, value)


def _describe(kind: Any) -> str:
    """A type in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is dict:
        return f"a dict of {_describe(args[0])} to {_describe(args[1])}"
    if origin is list:
        return f"a list of {_describe(args[0])}"
    return " or ".join(map(_describe, args)) if args else _NAMES[kind]
