"""Calls whose arguments are JSON as it stands: Hermes and Qwen (`<tool_call>`), and DeepSeek."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import regex  # type: ignore[import-untyped]

from rapid_infer.server.parsers.base import ToolParser

# DeepSeek's tags are written with a wide bar and a lower block.
_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
_STRING = r'"((?:[^"\\\x00-\x1f]|\\.)*)"'


class JsonCallParser(ToolParser):
    """`head` reads from the start tag to the arguments' brace, and its groups hold the name; `tail` reads what follows
    them. After anything else, text up to `close` is left out: the call has been told already.
    """

    head: ClassVar[Any]
    tail: ClassVar[Any]
    close: ClassVar[str]
    name_is_json: ClassVar[bool] = False

    def _begin(self, start: str) -> None:
        self._state = self._head

    def _head(self) -> bool:
        buffer = self._buffer
        found = self.head.match(buffer)
        if found is not None:
            name = next(group for group in found.groups() if group is not None)
            self._call(json.loads(f'"{name}"') if self.name_is_json else name.strip())
            self._buffer = buffer[found.end() :]
            self._depth, self._quoted, self._escaped = 0, False, False
            self._state = self._value
            return True
        if not self._final and self.head.fullmatch(buffer, partial=True) is not None:
            return False
        return self._other_head()

    def _other_head(self) -> bool:
        return self._no_call()

    def _value(self) -> bool:
        for at, char in enumerate(self._buffer):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._arguments(self._buffer[: at + 1])
                    self._buffer = self._buffer[at + 1 :]
                    self._state = self._tail
                    return True
        self._arguments(self._buffer)
        self._buffer = ""
        return False

    def _tail(self) -> bool:
        found = self.tail.match(self._buffer)
        if found is not None:
            self._buffer = self._buffer[found.end() :]
            self._state = self._text
            return True
        if self._final:
            self._buffer = ""
            return False
        if self.tail.fullmatch(self._buffer, partial=True) is None:
            self._state = self._skip
            return True
        return False

    def _skip(self) -> bool:
        at = self._buffer.find(self.close)
        if at >= 0:
            self._buffer = self._buffer[at + len(self.close) :]
            self._state = self._text
            return True
        self._buffer = "" if self._final else self._buffer[-len(self.close) :]
        return False


def _schema(function: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(function.get("parameters") or {"type": "object"})


class HermesParser(JsonCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write."""

    starts = ("<tool_call>",)
    close = "</tool_call>"
    head = regex.compile(rf'\s*\{{\s*"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
    tail = regex.compile(r"\s*\}\s*</tool_call>")
    name_is_json = True

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<tool_call>" in template and "<function=" not in template

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, literal: Callable[[str], str]) -> str:
        names = [f"call_{at}" for at in range(len(functions))]
        lines = ['start: call ("\\n" call)*' if parallel else "start: call", f"call: {' | '.join(names)}"]
        for name, function in zip(names, functions):
            head = f'\n{{"name": {json.dumps(function["name"])}, "arguments": '
            lines.append(
                f"{name}: {literal('<tool_call>')} {literal(head)} {name}_arguments {literal('}' + chr(10))} "
                f"{literal('</tool_call>')}"
            )
            lines.append(f"{name}_arguments: {_schema(function)}")
        return "\n".join(lines)

    def _other_head(self) -> bool:
        """The keys in another order, say: the whole call is looked at once it is there."""
        if not self._buffer.lstrip().startswith("{"):
            return self._no_call()
        self._state = self._whole
        return True

    def _whole(self) -> bool:
        at = self._buffer.find(self.close)
        if at < 0:
            return self._final and self._no_call()
        try:
            call = json.loads(self._buffer[:at])
            name = call["name"]
            arguments = call.get("arguments", call.get("parameters", {}))
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            if not isinstance(name, str) or not isinstance(json.loads(text), dict):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self._no_call()
        self._call(name)
        self._arguments(text)
        self._buffer = self._buffer[at + len(self.close) :]
        self._state = self._text
        return True


class DeepSeekParser(JsonCallParser):
    """What DeepSeek-V3, R1 and V3.1 write: the name, and JSON that the older ones fence."""

    starts = (_CALL,)
    noise = (_CALLS, _CALLS_END)
    close = _CALL_END
    head = regex.compile(rf"(?:function{_SEP}([^\n<\uff5c]+)\n```json\s*|(?!function<)([^\n<\uff5c]+){_SEP}\s*)(?=\{{)")
    tail = regex.compile(rf"\s*(?:```)?\s*{_CALL_END}")

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CALL in template

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        return (*cls.starts, *cls.noise, cls.close, _SEP)

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, literal: Callable[[str], str]) -> str:
        names = [f"call_{at}" for at in range(len(functions))]
        first, last = map(literal, cls.noise)
        lines = [f"start: {first} call{'+' if parallel else ''} {last}", f"call: {' | '.join(names)}"]
        for name, function in zip(names, functions):
            lines.append(
                f"{name}: {literal(cls.starts[0])} {literal(function['name'])} {literal(_SEP)} "
                f"{name}_arguments {literal(cls.close)}"
            )
            lines.append(f"{name}_arguments: {_schema(function)}")
        return "\n".join(lines)
