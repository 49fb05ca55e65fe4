"""Files and names that docs/architecture.md and its figures mention are in the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from xml.sax.saxutils import unescape

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
SOURCES = [*ROOT.glob("rapid_infer/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
NAME = re.compile(r"(?<![\w-])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def names_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """(identifiers; words of strings that are no docstrings: options, keys, parameters of checkpoints)"""
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    identifiers: set[str] = set()
    words: set[str] = set()
    for node in ast.walk(tree):
        values = (getattr(node, field, None) for field in ("name", "id", "attr", "arg"))
        identifiers.update(value for value in values if isinstance(value, str))
        if isinstance(node, ast.Constant) and node not in docstrings:
            words.update(re.findall(r"\w+", str(node.value)))
    return identifiers, words


@cache
def code() -> tuple[set[str], set[str], dict[str, set[str]]]:
    """As `names_in`, with files and folders among the words, and identifiers in the body of each class."""
    identifiers: set[str] = set()
    words = {part for file in SOURCES for part in file.relative_to(ROOT).with_suffix("").parts}
    members: dict[str, set[str]] = defaultdict(set)
    for file in SOURCES:
        tree = ast.parse(file.read_text())
        found = names_in(tree)
        identifiers |= found[0]
        words |= found[1]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members[node.name] |= names_in(node)[0]
    return identifiers, words, dict(members)


def spans() -> list[str]:
    return re.findall(r"`([^`\n]+)`", PAGE.read_text())


def drawn() -> list[str]:
    """Of the figures: titles, and words that can be nothing but names."""
    found: list[str] = []
    for figure in re.findall(r"\]\((figures/[^)]+)\)", PAGE.read_text()):
        for how, text in re.findall(r"<text ([^>]*)>([^<]+)</text>", (PAGE.parent / figure).read_text()):
            names = NAME.findall(unescape(text))
            found += names if "bold" in how else [name for name in names if re.search("_|[a-z][A-Z]", name)]
    return found


def is_known(name: str) -> bool:
    """Of a name with dots: each part, in the class before it if that is one."""
    identifiers, words, members = code()
    parts = name.split(".")
    return all(
        part in identifiers if re.match("[A-Z].*[a-z]", part) else part in members.get(owner, identifiers | words)
        for owner, part in zip(["", *parts], parts)
    )


def test_files_and_names_on_the_page_are_in_the_code() -> None:
    assert len(spans()) > 150
    wrong = []
    for span in spans():
        if re.fullmatch(r"[\w/]+\.py", span):
            wrong += [span] * (
                not any(file.as_posix().endswith(f"/{span}") for file in [*SOURCES, ROOT / span] if file.exists())
            )
        elif not re.match(r"[$.\[]|make ", span):
            wrong += [name for name in NAME.findall(span) if name != "True" and not is_known(name)]
    assert not wrong


def test_names_in_its_figures_are_in_the_code() -> None:
    assert {"StepPlan", "PlanCache.next", "commit_tokens", "new_blocks"} <= set(drawn())
    assert not [name for name in drawn() if not is_known(name)]


def test_names_that_are_gone_are_found() -> None:
    """A class, one of its members, a function, an option."""
    assert all(map(is_known, ("StepRing", "StepRing.write_mixed", "commit_tokens", "enforce_eager")))
    assert not any(map(is_known, ("Mailbox", "StepRing.send_mixed", "commit_letters", "enforce_lazy")))
