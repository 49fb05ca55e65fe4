"""Draws docs/figures/terminal.svg from what these commands print: `python scripts/record_terminal.py`.

It runs them; with `--check` it compares only. Standard output is drawn, not standard error, which has the times. The
demo model must be there, or a network to fetch it.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from rapid_infer.cli import app

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "figures" / "terminal.svg"
COMMANDS = (
    'rapid-infer generate demo --chat --greedy -p "What is the capital of Japan?"',
    "rapid-infer plugin new my-model --like qwen3",
    "rapid-infer plugin check rapid-infer-llama --only weight_map --only batch --only graphs --only parallel",
)
WIDTH, LINE, MARGIN = 900, 20, 18
NO_BREAK = "\N{NO-BREAK SPACE}"
"""Several plain ones would be drawn as one."""
PAPER, INK, TYPED = "#1f2933", "#cbd2d9", "#ffffff"


def printed(command: str) -> list[str]:
    """The lines on standard output. RuntimeError for a command that fails."""
    out, code = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            app.run(shlex.split(command)[1:])
        except SystemExit as left:
            code = left.code
    if code:
        raise RuntimeError(f"{command}: exit code {code}")
    return out.getvalue().rstrip("\n").split("\n")


def record() -> list[tuple[str, list[str]]]:
    """Every command with its output, run one after the other in an empty folder."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return [(command, printed(command)) for command in COMMANDS]


def draw(recorded: Sequence[tuple[str, list[str]]]) -> str:
    rows: list[tuple[str, str]] = []
    for command, lines in recorded:
        rows += [(TYPED, f"$ {command}"), *((INK, line) for line in lines), (INK, "")]
    rows = [(color, line.replace(" ", NO_BREAK)) for color, line in rows[:-1]]
    height = LINE * len(rows) + 2 * MARGIN
    texts = (
        f'<text x="{MARGIN}" y="{MARGIN + LINE * number + 14}" fill="{color}">{escape(line)}</text>\n'
        for number, (color, line) in enumerate(rows)
        if line
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13">\n'
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>\n{"".join(texts)}</svg>\n'
    )


def main() -> None:
    made = draw(record())
    if "--check" not in sys.argv:
        FIGURE.write_text(made, encoding="utf-8")
    elif not FIGURE.exists() or FIGURE.read_text(encoding="utf-8") != made:
        sys.exit(f"out of date: {FIGURE.name}; run python scripts/record_terminal.py")


if __name__ == "__main__":
    main()
