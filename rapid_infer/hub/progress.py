"""Who watches a download: nobody, or a person at a terminal."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rapid_infer.hub.entry import FileEntry

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Watcher(Protocol):
    """Told what happens; `advance` and `finish` come from several threads."""

    def note(self, text: str) -> None:
        """One line for a person."""
        ...

    def plan(self, entries: Sequence[FileEntry]) -> None:
        """These files come next."""
        ...

    def advance(self, path: str, size: int) -> None:
        """`size` bytes of the file are there now; less than before when it starts again."""
        ...

    def finish(self, path: str) -> None:
        """The file is verified and has its name."""
        ...


class Silent:
    """Sees nothing."""

    def note(self, text: str) -> None: ...
    def plan(self, entries: Sequence[FileEntry]) -> None: ...
    def advance(self, path: str, size: int) -> None: ...
    def finish(self, path: str) -> None: ...


class Bars:
    """A bar for each file that is being fetched, and one in total."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._sizes: dict[str, int] = {}
        self._there: dict[str, int] = {}
        self._tasks: dict[str, TaskID] = {}
        self._total: TaskID | None = None

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def plan(self, entries: Sequence[FileEntry]) -> None:
        self._sizes = {entry.path: entry.size for entry in entries}
        self._there = {}
        for path in list(self._tasks):  # of a hub that has failed
            self.finish(path)
        if self._total is None:
            self._total = self._progress.add_task("total")
        self._progress.update(self._total, total=sum(self._sizes.values()), completed=0)

    def advance(self, path: str, size: int) -> None:
        if path not in self._tasks:
            self._tasks[path] = self._progress.add_task(path, total=self._sizes.get(path))
        self._there[path] = size
        self._progress.update(self._tasks[path], completed=size)
        if self._total is not None:
            self._progress.update(self._total, completed=sum(list(self._there.values())))

    def finish(self, path: str) -> None:
        task = self._tasks.pop(path, None)
        if task is not None:
            self._progress.remove_task(task)


@contextmanager
def watching() -> Iterator[Watcher]:
    """Bars and notes on stderr when that is a terminal; else silence."""
    if not sys.stderr.isatty():
        yield Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield Bars(progress)
