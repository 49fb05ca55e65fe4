"""Tables for people: as wide as the terminal, and wide enough not to be cut in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 200


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def print_table(
    out: Console, rows: Iterable[Sequence[object]], *, columns: Sequence[str] = (), title: str | None = None
) -> None:
    """Print `rows`, and an empty line after them. Without `columns` there is no header."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=bool(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    out.print(table, "")


def size_text(count: int) -> str:
    """Bytes for people: GB from one up, else MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
