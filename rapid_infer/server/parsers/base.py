"""What parsers give, and the machine that tool parsers are: text is shown as soon as no later text can change it.

What a parser gives depends on the text alone, not on how it was cut: `merged` deltas of any cuts are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = Reasoning | Content | Call | Arguments


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind put together, empty ones left out."""
    found: list[Delta] = []
    for one in deltas:
        last = found[-1] if found else None
        if isinstance(one, Call):
            found.append(one)
        elif one.text and last is not None and type(last) is type(one) and _same_call(last, one):
            found[-1] = replace(last, text=last.text + one.text)
        elif one.text:
            found.append(one)
    return found


def _same_call(one: Delta, other: Delta) -> bool:
    return getattr(one, "index", 0) == getattr(other, "index", 0)


def held_back(text: str, tags: Sequence[str]) -> int:
    """Length of the longest end of `text` with which some tag begins."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest


class ToolParser:
    """One completion. Subclasses name `starts`, the texts that may begin a call, and `_begin` says what follows one.

    `_state` looks at `_buffer`, takes what it can decide and returns whether to look again. White space around calls
    is no part of the answer.
    """

    starts: ClassVar[tuple[str, ...]]
    noise: ClassVar[tuple[str, ...]] = ()
    """Tags that mean nothing by themselves, and are left out."""

    @classmethod
    def fits(cls, template: str) -> bool:
        """Whether a model with this chat template writes calls this way."""
        raise NotImplementedError

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        """Texts that must not be left out where the tokenizer has them as special tokens."""
        return (*cls.starts, *cls.noise)

    @classmethod
    def grammar(cls, functions: Sequence[Mapping[str, Any]], parallel: bool, literal: Callable[[str], str]) -> str:
        """A Lark grammar of calls of these functions, at least one; `literal` writes a text or special token."""
        raise NotImplementedError

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._buffer = ""
        self._final = False
        self._calls = 0
        self._out: list[Delta] = []
        self._state: Callable[[], bool] = self._text

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        return self._run()

    def finish(self) -> list[Delta]:
        """No more text comes."""
        self._final = True
        return self._run()

    def _run(self) -> list[Delta]:
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    def _begin(self, start: str) -> None:
        """`start` has been read; `_state` is to become what reads on."""
        raise NotImplementedError

    def _text(self) -> bool:
        buffer = self._buffer
        if "<" not in buffer and buffer and not buffer[-1].isspace() and self._calls == 0:
            self._out.append(Content(buffer))
            self._buffer = ""
            return False
        found = [(at, -len(tag), tag) for tag in (*self.starts, *self.noise) if (at := buffer.find(tag)) >= 0]
        if found:
            at, _, tag = min(found)
            before = buffer[:at]
            if tag in self.noise:
                self._buffer = before + buffer[at + len(tag) :]
                return True
            if before.strip():
                self._out.append(Content(before.rstrip()))
                before = before[len(before.rstrip()) :]
            self._space, self._start, self._buffer = before, tag, buffer[at + len(tag) :]
            self._begin(tag)
            return True
        if self._final:
            if buffer.strip() or not self._calls:
                self._out.append(Content(buffer))
            self._buffer = ""
            return False
        shown = buffer[: len(buffer) - held_back(buffer, (*self.starts, *self.noise))].rstrip()
        if shown:
            self._out.append(Content(shown))
            self._buffer = buffer[len(shown) :]
        return False

    def _no_call(self) -> bool:
        """What looked like the beginning of a call was prose."""
        self._out.append(Content(self._space + self._start))
        self._state = self._text
        return True

    def _call(self, name: str) -> None:
        self._out.append(Call(self._calls, name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        self._out.append(Arguments(self._calls - 1, text))
