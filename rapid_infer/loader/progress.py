"""How loading says how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Called once, with all bytes to come; gives a context whose value is called with the bytes of each piece read."""

    def __call__(self, total_bytes: int, /) -> AbstractContextManager[Callable[[int], None]]: ...


@contextmanager
def silent(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Shows nothing."""
    yield lambda _: None


@contextmanager
def terminal_bar(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr with bytes, speed and time left; nothing when stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console) as bar:
        task = bar.add_task("loading weights", total=total_bytes)
        yield lambda nbytes: bar.advance(task, nbytes)
