"""Standard streams as commands need them: there, forgiving of characters, and noticed when they cannot be written."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator


class Output(io.TextIOWrapper):
    """Writes to the file of `stream`. `lost`: its first error, by which that is told from any other of a command."""

    lost: OSError | None = None

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            stream.encoding,
            errors="replace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._stream = stream  # when this one ends, it closes the file

    def write(self, text: str) -> int:
        with self._noticed():
            return super().write(text)

    def flush(self) -> None:
        with self._noticed():
            super().flush()

    @contextlib.contextmanager
    def _noticed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.lost = self.lost or error
            raise


def prepare() -> None:
    """Give a stream that the caller has closed the null device, and let no character end a command.

    Lines of standard input end at a line feed, and nowhere else.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8")
        if name != "stdin" and type(stream) is io.TextIOWrapper:
            stream = Output(stream)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace", newline="\n" if name == "stdin" else None)
        setattr(sys, name, stream)


def written(command: Callable[[], int]) -> int:
    """The exit code of `command`; 1, with one error, when what it printed cannot be written."""
    outputs = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, Output)]
    try:
        code = command()
        for stream in outputs:
            stream.flush()
    except OSError:
        if not any(stream.lost for stream in outputs):
            raise
    for stream in outputs:
        if stream.lost is not None:
            # Python flushes once more when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    lost = next((stream.lost for stream in outputs if stream.lost is not None), None)
    if lost is None:
        return code
    if not isinstance(lost, BrokenPipeError):  # `| head` has seen enough
        print(f"error: the output cannot be written: {lost.strerror}; what is missing is lost", file=sys.stderr)
    return 1
