"""Stop strings: found across token borders, and never shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches a text that comes in pieces.

    What might be the beginning of a stop string is held back until it is clear. The match is the one that ends first,
    and of those the longest, so that it does not depend on how the text was cut.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, watch: bool = True) -> str:
        """Take the next piece; returns what may be shown.

        After a match, `matched` says which, and nothing more comes. Without `watch`, what is complete within this
        piece does not count; what only begins in it does.
        """
        if self.matched is not None:
            return ""
        before = len(self._held)
        self._held += text
        found = []
        for stop in self._stops if watch else ():
            # Only what ends in the new piece: anything earlier was not to be watched.
            at = self._held.find(stop, max(before - len(stop) + 1, 0))
            if at >= 0:
                found.append((at + len(stop), -len(stop), stop))
        if found:
            end, _, stop = min(found)
            self.matched = stop
            shown, self._held = self._held[: end if self._include else end - len(stop)], ""
            return shown
        keep = self._undecided()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def _undecided(self) -> int:
        """Length of the longest end of the held text with which some stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def flush(self) -> str:
        """No more text comes: what was held back is shown after all."""
        shown, self._held = self._held, ""
        return shown
