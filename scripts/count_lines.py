"""Prints how many lines of code each package has, and its budget: `python scripts/count_lines.py`.

Blank lines, comments and docstrings, also those of attributes, are no code.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
NOT_ENGINE = ("kernels", "ops", "hub", "cli", "server", "testing", "plugins", "examples")
ENGINE = "engine proper"
MODULES = "modules"
"""The files beside the packages of the runtime."""

BUDGETS = {
    # Everything that takes a request from text to text, whatever runs it.
    ENGINE: 8_500,
    MODULES: 1_700,
    "cache": 550,
    "engine": 1_200,
    "executors": 800,
    "frontend": 375,
    "ipc": 500,
    "layers": 1_000,
    "loader": 1_400,
    "models": 200,
    "parallel": 675,
    "processes": 225,
    "quant": 1_000,
    "text": 475,
    "worker": 1_600,
    # Around it.
    "kernels": 5_000,
    "ops": 1_900,
    "hub": 2_100,
    "cli": 1_900,
    "server": 2_600,
    "testing": 1_600,
    # A dense model is about 150 lines.
    "plugins/deepseek_v2": 150,
    "plugins/llama": 100,
    "plugins/ops_attention": 300,
    "plugins/qwen3": 150,
    "examples/op-cuda": 100,
    "examples/plugin-gemma2": 150,
    "examples/quantization": 50,
}
"""Lines that a part should not exceed: what is above is printed, and ought to be made shorter, not the number larger.

A package's number is where it should stop growing; the engine's is what all of them together ought to come down to.
"""

SOURCES = ("rapid_infer/**/*.py", "plugins/*/src/**/*.py", "examples/*/src/**/*.py")
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
    """The part of the repository that a source file counts for: a package of the runtime, or one outside of it."""
    if KERNELS in file.parents:
        return "kernels"
    folder, *rest = file.relative_to(ROOT).parts
    if folder != "rapid_infer":
        return f"{folder}/{rest[0]}"
    return rest[0] if len(rest) > 1 else MODULES


def count(files: Iterable[Path]) -> dict[str, int]:
    """Lines of each part, and of the engine proper, which is all of the runtime that is not named in NOT_ENGINE."""
    totals: dict[str, int] = {}
    for file in sorted(files):
        part, lines = part_of(file), code_lines(file.read_text(encoding="utf-8"))
        totals[part] = totals.get(part, 0) + lines
        if part.partition("/")[0] not in NOT_ENGINE:
            totals[ENGINE] = totals.get(ENGINE, 0) + lines
    return totals


def report(totals: Mapping[str, int]) -> str:
    """A line for each part, with its budget; the engine proper is the sum of those under it."""
    engine = sorted(part for part in totals if part.partition("/")[0] not in (*NOT_ENGINE, ENGINE))
    others = sorted(part for part in totals if part.partition("/")[0] in NOT_ENGINE)
    lines = [f"{'lines of code':24} {'are':>7} {'budget':>7}"]
    for part in (ENGINE, *engine, *others):
        budget = BUDGETS.get(part)
        over = totals[part] - budget if budget is not None else 0
        shown = f"{budget:,}" if budget is not None else "none"
        name = f"  {part}" if part in engine else part
        lines.append(f"{name:24} {totals[part]:7,} {shown:>7}" + (f"  {over:,} over" if over > 0 else ""))
    return "\n".join(lines)


def main() -> None:
    print(report(count(file for pattern in SOURCES for file in ROOT.glob(pattern))))


if __name__ == "__main__":
    main()
