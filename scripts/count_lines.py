"""Prints how many lines of code each part of the runtime has: `python scripts/count_lines.py`.

Blank lines, comments and docstrings, also those of attributes, are no code.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
NOT_ENGINE = ("ops", "hub", "cli", "server", "testing")
KERNELS = ROOT / "rapid_infer" / "ops" / "providers" / "triton"


def code_lines(source: str) -> int:
    """SyntaxError where `source` is not Python."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    texts = source.splitlines()
    return sum(1 for line in lines if texts[line - 1].strip())


def part_of(file: Path) -> str:
    """The part of the repository that a source file counts for."""
    if KERNELS in file.parents:
        return "kernels"
    if file.is_relative_to(ROOT / "plugins"):
        return "plugins"
    package = file.relative_to(ROOT / "rapid_infer").parts[0]
    return package if package in NOT_ENGINE else "engine proper"


def count(files: Iterable[Path]) -> dict[str, int]:
    totals = dict.fromkeys(("engine proper", "kernels", *NOT_ENGINE, "plugins"), 0)
    for file in files:
        totals[part_of(file)] += code_lines(file.read_text(encoding="utf-8"))
    return totals


def main() -> None:
    files = [*ROOT.glob("rapid_infer/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    print("lines of code: " + ", ".join(f"{part} {lines:,}" for part, lines in count(files).items()))


if __name__ == "__main__":
    main()
