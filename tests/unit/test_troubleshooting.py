"""Every message that docs/troubleshooting.md quotes is one that the code can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rapid_infer import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
SOURCES = [*ROOT.glob("rapid_infer/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
VALUE = "…"


def texts(tree: ast.AST) -> Iterator[str]:
    """Strings of a source; what stands in braces, and code spans, which a table's cell cannot hold, are a VALUE."""
    nodes = list(ast.walk(tree))
    left_out = {node.value for node in nodes if isinstance(node, ast.Expr)}
    left_out |= {piece for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values}
    for node in nodes:
        if node in left_out:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        yield re.sub(r"`[^`]*`|%[sd]|%\.\df", VALUE, text)


@cache
def said() -> str:
    return "\n".join(text for file in SOURCES for text in texts(ast.parse(file.read_text())))


def quoted() -> list[str]:
    """The code spans in the first column of the tables, whose heads say "message"."""
    spans: list[str] = []
    for table in re.findall(r"^\| message \|.*\n\|[-| ]+\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE):
        for row in table.splitlines():
            spans += re.findall(r"`([^`]+)`", re.split(r" \| ", row, maxsplit=1)[0])
    return list(dict.fromkeys(spans))


def test_each_error_class_has_a_cause_and_a_cure() -> None:
    table = re.search(r"^\| error \| cause \| cure \|\n\|[-| ]+\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    assert table
    rows = [row.strip("|").split(" | ") for row in table[1].splitlines()]
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"RapidInferError"}
    assert {row[0].strip(" `") for row in rows} == classes
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)


def test_the_page_has_messages() -> None:
    assert len(quoted()) > 200


@pytest.mark.parametrize("message", quoted())
def test_each_quoted_message_occurs_in_the_code(message: str) -> None:
    """All pieces between values, in this order, in one string."""
    pieces = [piece for piece in message.split(VALUE) if piece]
    assert re.search(".*".join(map(re.escape, pieces)), said()), message
