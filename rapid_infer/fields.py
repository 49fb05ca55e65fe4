"""Values that users give: numbers of other libraries become Python's, and types are what the annotations say."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sized
from difflib import get_close_matches
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "text", NoneType: "None"}

_UNFIT = (msgspec.ValidationError, TypeError, OverflowError)
"""Of a wrong type, or holding what cannot be sent where any value may be."""


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
        raise error(_no_text(name, reason)) from None


def _no_text(name: str, reason: UnicodeEncodeError) -> str:
    return (
        f"{name} has the lone surrogate {reason.object[reason.start]!a} at character {reason.start}, which is no text: "
        'expected valid Unicode; text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") repairs it'
    )


def shortened(value: object) -> str:
    """For a message; a long list, dict or text is told by its beginning and its length."""
    text = repr(value)
    return text if len(text) <= 200 or not isinstance(value, Sized) else f"{text:.100}... ({len(value)} entries)"


def check_fields(options: Any, error: type[Exception]) -> None:
    """Check every field of a frozen dataclass against its annotation; `error` names the first that is wrong.

    Texts must be ones that can be sent to another process.
    """
    kinds, struct = _field_types(options.__class__)
    values = {name: _plain_field(name, value, error) for name, value in vars(options).items()}
    try:
        checked = _convert(values, struct)
    except (*_UNFIT, UnicodeEncodeError, RecursionError):
        for name, kind in kinds.items():
            _check_field(name, values[name], kind, error)
        raise
    vars(options).update(msgspec.structs.asdict(checked))


def _plain_field(name: str, value: Any, error: type[Exception]) -> Any:
    try:
        return plain(value)
    except RecursionError:
        raise error(_nested(name)) from None


def _nested(name: str) -> str:
    return f"{name} is nested too deeply to be read: give fewer levels"


def _convert(value: Any, kind: Any) -> Any:
    checked = msgspec.convert(value, kind, str_keys=True)
    msgspec.msgpack.encode(checked)
    return checked


def _check_field(name: str, value: Any, kind: Any, error: type[Exception]) -> None:
    try:
        _convert(value, kind)
    except _UNFIT:
        raise error(_misfit(name, value, kind)) from None
    except UnicodeEncodeError as reason:
        raise error(_no_text(name, reason)) from None
    except RecursionError:
        raise error(_nested(name)) from None


def wrong_field(options: Any, name: str, error: type[Exception]) -> Exception:
    """`error` as of `check_fields`, for a value that no annotation can tell from a right one."""
    return error(_misfit(name, getattr(options, name), _field_types(options.__class__)[0][name]))


def _misfit(name: str, value: object, kind: Any) -> str:
    return f"{name} must be {_describe(kind)}, got {shortened(value)}"


def unknown_field(cls: type, values: Iterable[str]) -> str | None:
    """The first of `values` that is no field of the dataclass `cls`, quoted for a message beside the known ones."""
    names = [field.name for field in dataclasses.fields(cls)]
    unknown = next((name for name in values if name not in names), None)
    if unknown is None:
        return None
    near = get_close_matches(unknown, names, n=1)
    return f"{unknown!r}: {f'did you mean {near[0]!r}? ' if near else ''}Known: {', '.join(names)}"


@cache
def _field_types(cls: Hashable) -> tuple[dict[str, Any], type[msgspec.Struct]]:
    """What the fields of a dataclass are annotated with, and a struct of them: msgspec parses its types once."""
    kinds = get_type_hints(cls, include_extras=True)
    return kinds, msgspec.defstruct("Fields", kinds.items())


def _describe(kind: Any) -> str:
    """A type in words: those that its `Meta` has, or what follows from it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        limits = args[1]
        return limits.description or f"{_describe(args[0])} from {limits.ge} to {limits.le}"
    if origin is dict:
        return f"a dict of {_describe(args[0])} to {_describe(args[1])}"
    if origin is list:
        return f"a list of {_describe(args[0])}"
    return " or ".join(map(_describe, args)) if args else _NAMES[kind]
