"""Calls as Qwen3-Coder writes them: XML, each parameter in a tag of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex  # type: ignore[import-untyped]

from rapid_infer.server.parsers.base import ToolParser

_NAME = regex.compile(r"\s*<function=([^>\n]+)>")
_NEXT = regex.compile(r"\s*(?:<parameter=([^>\n]+)>|(</function>))")
_CLOSE = regex.compile(r"\s*</tool_call>")
_END = "</parameter>"


class Qwen3CoderParser(ToolParser):
    """Values are JSON where the function's schema says that they are no text. A call may lack its `<tool_call>`."""

    starts = ("<tool_call>", "<function=")

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<tool_call>" in template and "<function=" in template

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, literal: Callable[[str], str]) -> str:
        names = [f"call_{at}" for at in range(len(functions))]
        lines = ['start: call ("\\n" call)*' if parallel else "start: call", f"call: {' | '.join(names)}"]
        for name, function in zip(names, functions):
            parts = [literal("<tool_call>"), literal(f"\n<function={function['name']}>\n")]
            schema = function.get("parameters") or {}
            for at, (key, kind) in enumerate((schema.get("properties") or {}).items()):
                rule = f"{name}_value_{at}"
                part = f"({literal(f'<parameter={key}>' + chr(10))} {rule})"
                parts.append(part if key in (schema.get("required") or ()) else part + "?")
                end = literal(f"\n{_END}\n")
                if not _is_text(kind):
                    lines += [f"{rule}: {rule}_json {end}", f"{rule}_json: %json {json.dumps(kind)}"]
                elif "enum" in kind:
                    lines.append(f"{rule}: ({' | '.join(literal(str(one)) for one in kind['enum'])}) {end}")
                else:
                    lines.append(f"{rule}[suffix={end}]: /(?s:.*)/")
            parts += [literal("</function>\n"), literal("</tool_call>")]
            lines.append(f"{name}: {' '.join(parts)}")
        return "\n".join(lines)

    def _begin(self, start: str) -> None:
        if start == "<function=":
            self._buffer = start + self._buffer
        self._keys = 0
        self._state = self._name

    def _name(self) -> bool:
        found = _NAME.match(self._buffer)
        if found is None:
            if not self._final and _NAME.fullmatch(self._buffer, partial=True) is not None:
                return False
            return self._prose()
        name = found[1].strip()
        if self._start == "<function=" and name not in self._functions:
            return self._prose()
        self._types = ((self._functions.get(name) or {}).get("parameters") or {}).get("properties") or {}
        self._call(name)
        self._buffer = self._buffer[found.end() :]
        self._state = self._next
        return True

    def _prose(self) -> bool:
        if self._start == "<function=":
            self._buffer = self._buffer[len(self._start) :]
        return self._no_call()

    def _next(self) -> bool:
        found = _NEXT.match(self._buffer)
        if found is not None:
            self._buffer = self._buffer[found.end() :]
            if found[1] is None:
                self._arguments("{}" if self._keys == 0 else "}")
                self._state = self._close
            else:
                self._key = found[1].strip()
                self._state = self._value
            return True
        if not self._final and _NEXT.fullmatch(self._buffer, partial=True) is None:
            # Nothing that belongs here: go on at the next tag that does.
            at = self._buffer.find("<", 1)
            keep = len(self._buffer) - 1 if self._buffer.endswith("<") else len(self._buffer)
            self._buffer = self._buffer[at if at > 0 else max(keep, 1) :]
            return bool(self._buffer)
        return False

    def _value(self) -> bool:
        at = self._buffer.find(_END)
        if at < 0:
            return False
        text = self._buffer[:at].removeprefix("\n").removesuffix("\n")
        self._arguments(("{" if self._keys == 0 else ", ") + f"{json.dumps(self._key)}: {self._as_json(text)}")
        self._keys += 1
        self._buffer = self._buffer[at + len(_END) :]
        self._state = self._next
        return True

    def _as_json(self, text: str) -> str:
        kind = self._types.get(self._key)
        if isinstance(kind, Mapping) and not _is_text(kind):
            try:
                return json.dumps(json.loads(text), ensure_ascii=False)
            except (ValueError, RecursionError):
                if text.strip() in ("True", "False", "None"):
                    return {"True": "true", "False": "false", "None": "null"}[text.strip()]
        return json.dumps(text, ensure_ascii=False)

    def _close(self) -> bool:
        found = _CLOSE.match(self._buffer)
        if found is None and not self._final and _CLOSE.fullmatch(self._buffer, partial=True) is not None:
            return False
        self._buffer = self._buffer[found.end() if found is not None else 0 :]
        self._state = self._text
        return True


def _is_text(kind: Any) -> bool:
    """Whether a value is written as it is: a text, or of a kind that nobody has said."""
    if not isinstance(kind, Mapping):
        return True
    return kind.get("type", "string") == "string" and not kind.keys() & {"anyOf", "oneOf", "allOf", "$ref"}
