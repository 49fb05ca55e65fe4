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


def test_kernels_and_what_is_not_the_engine_are_counted_apart() -> None:
    package = ROOT / "rapid_infer"
    parts = {
        "ops/providers/triton/norm.py": "kernels",
        "ops/providers/cpu/linear.py": "ops",
        "testing/op_cases/case.py": "testing",
        "engine/core.py": "engine proper",
        "llm.py": "engine proper",
    }
    assert {name: count_lines.part_of(package / name) for name in parts} == parts
    assert count_lines.part_of(ROOT / "plugins" / "llama" / "src" / "rapid_infer_llama" / "model.py") == "plugins"
