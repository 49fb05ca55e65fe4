"""What `make check` counts as code."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("count_lines", ROOT / "scripts" / "count_lines.py")
assert SPEC is not None
assert SPEC.loader is not None
count_lines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(count_lines)

SOURCE = '''"""A module.

Two paragraphs.
"""
# A comment.

LIMIT = 3  # one
"""An attribute's words."""


def f(
    x,  # two, three
):  # four
    """What it does."""
    # Why.
    text = """five

    six"""
    return (
        # nothing
        text
    )
'''


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    assert count_lines.code_lines(SOURCE) == 9
    assert count_lines.code_lines("") == 0


def test_packages_are_counted_apart_and_kernels_too() -> None:
    package = ROOT / "rapid_infer"
    parts = {
        "ops/providers/triton/norm.py": "kernels",
        "ops/providers/cpu/linear.py": "ops",
        "testing/op_cases/case.py": "testing",
        "engine/core.py": "engine",
        "llm.py": "modules",
    }
    assert {name: count_lines.part_of(package / name) for name in parts} == parts
    assert count_lines.part_of(ROOT / "plugins" / "llama" / "src" / "rapid_infer_llama" / "model.py") == "plugins/llama"


def test_the_engine_is_the_sum_of_its_packages_and_what_is_over_its_budget_is_said() -> None:
    package = ROOT / "rapid_infer"
    totals = count_lines.count([package / "llm.py", package / "errors.py", package / "cli" / "verify.py"])
    assert totals["engine proper"] == totals["modules"] > 0
    assert "cli" in totals
    assert " over" not in count_lines.report(totals)
    shown = count_lines.report({"engine proper": 8_600, "modules": 8_600, "plugins/new": 3}).splitlines()
    assert [line.split() for line in shown[1:]] == [
        ["engine", "proper", "8,600", "8,500", "100", "over"],
        ["modules", "8,600", "1,700", "6,900", "over"],
        ["plugins/new", "3", "none"],
    ]


def test_every_package_has_a_budget() -> None:
    files = [file for pattern in count_lines.SOURCES for file in ROOT.glob(pattern)]
    assert {count_lines.part_of(file) for file in files} <= count_lines.BUDGETS.keys()
