"""`<think>` at the beginning of an answer, apart from the rest."""

from __future__ import annotations

from enum import Enum, auto

from rapid_infer.server.parsers.base import Content, Delta, Reasoning, held_back


class Begin(Enum):
    """Where an answer begins: in the middle of thinking, after it or without it, or as the model decides."""

    INSIDE = auto()
    AFTER = auto()
    UNKNOWN = auto()


class ThinkParser:
    """One completion. Only a tag that opens the answer is a tag; later ones are text, as is everything after thinking.

    White space around the thinking belongs to neither side.
    """

    start = "<think>"
    end = "</think>"

    @classmethod
    def fits(cls, template: str) -> bool:
        return cls.start in template or cls.end in template

    @classmethod
    def begins(cls, prompt: str, begun: str = "") -> Begin:
        """How the answer to a rendered prompt begins; `begun` is the part of it that the prompt has already."""
        text = prompt.rstrip()
        if text.endswith(cls.start):
            return Begin.INSIDE
        if text.endswith(cls.end):
            return Begin.AFTER
        if begun.strip():
            open_ = begun.lstrip().startswith(cls.start) and cls.end not in begun
            return Begin.INSIDE if open_ else Begin.AFTER
        return Begin.UNKNOWN

    def __init__(self, begin: Begin) -> None:
        self._held = ""
        self._state = begin
        # What follows the thinking begins without white space; an answer without any is left as it is.
        self._strip = begin is Begin.INSIDE

    def push(self, text: str) -> list[Delta]:
        if self._state is Begin.AFTER and not self._strip:
            return [Content(text)] if text else []
        self._held += text
        return self._run(final=False)

    def finish(self) -> list[Delta]:
        """No more text comes."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Delta]:
        out: list[Delta] = []
        if self._state is Begin.UNKNOWN and not self._decide(final):
            return out
        if self._state is Begin.INSIDE:
            self._think(out, final)
        if self._state is Begin.AFTER:
            if self._strip:
                self._held = self._held.lstrip()
            if self._held:
                out.append(Content(self._held))
                self._held, self._strip = "", False
        return out

    def _decide(self, final: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(self.start):
            self._state, self._strip, self._held = Begin.INSIDE, True, text[len(self.start) :]
        elif final or not self.start.startswith(text):
            self._state = Begin.AFTER
        return self._state is not Begin.UNKNOWN

    def _think(self, out: list[Delta], final: bool) -> None:
        if self._strip:
            self._held = self._held.lstrip()
        at = self._held.find(self.end)
        if at >= 0:
            shown, self._held = self._held[:at].rstrip(), self._held[at + len(self.end) :]
            self._state, self._strip = Begin.AFTER, True
        else:
            keep = 0 if final else held_back(self._held, (self.end,))
            shown = self._held[: len(self._held) - keep].rstrip()
            self._held = "" if final else self._held[len(shown) :]
            self._strip = self._strip and not shown
        if shown:
            out.append(Reasoning(shown))
