"""What can be wrong between a checkpoint and a model, and how it is printed: in full, long lists grouped by layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d*)(?=\.|$)")
NUMBER_IN_TEXT = re.compile(r"(?<=\.)\d+(?=[.',;\s\[]|$)")
Numbers = tuple[int, ...]


class Kind(Enum):
    """The ways in which a checkpoint can fail to fill a model; the value is the heading it is printed under."""

    MISSING = "missing (parameters that no tensor fills)"
    UNEXPECTED = "unexpected (tensors that have no home in the model)"
    PARTLY_FILLED = "partly filled (some pieces are absent)"
    SHAPE = "shape mismatch"
    DTYPE = "dtype mismatch"
    TWICE = "filled twice"
    OVERLAP = "overlapping (tensors that write what another one writes)"


@dataclass(frozen=True)
class Problem:
    """One fault: `name` is a parameter (MISSING, PARTLY_FILLED) or else a checkpoint tensor; `detail` says more.

    `got` and `expected` are the shapes of a SHAPE problem.
    """

    kind: Kind
    name: str
    detail: str = ""
    got: tuple[int, ...] | None = None
    expected: tuple[int, ...] | None = None


def format_problems(problems: Sequence[Problem]) -> str:
    """All problems by kind, one line per group of names that differ only in their numbers."""
    lines: list[str] = []
    for kind in Kind:
        found = [problem for problem in problems if problem.kind is kind]
        if found:
            lines.append(f"{kind.value}: {len(found)}")
            lines.extend(f"  {line}" for line in _group_problems(found))
    return "\n".join(lines)


def summarize_problems(problems: Sequence[Problem]) -> str:
    """Counts by kind: "36 missing, 2 unexpected"."""
    counts = {kind: sum(problem.kind is kind for problem in problems) for kind in Kind}
    return ", ".join(f"{count} {kind.value.split(' (')[0]}" for kind, count in counts.items() if count)


def group_names(names: Iterable[str]) -> list[str]:
    """Names with their numbers folded: `model.layers.{0..35}.norm.weight (36)`; no name is left out."""
    folded: dict[str, list[Numbers]] = {}
    for name in names:
        numbers = tuple(int(number) for number in NUMBER.findall(name))
        folded.setdefault(NUMBER.sub("{}", name), []).append(numbers)
    return [line for template, numbers in folded.items() for line in _fold_numbers(template, numbers)]


def format_ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers with runs written as a..b: "0..3,7"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def _group_problems(problems: list[Problem]) -> list[str]:
    by_detail: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        key = (NUMBER.sub("N", problem.name), NUMBER_IN_TEXT.sub("N", problem.detail))
        by_detail.setdefault(key, []).append(problem)
    lines = []
    for (_, detail), members in by_detail.items():
        detail = members[0].detail if len(members) == 1 else detail
        for line in group_names(member.name for member in members):
            lines.append(f"{line}: {detail}" if detail else line)
    return lines


def _fold_numbers(template: str, numbers: list[Numbers]) -> list[str]:
    """Boxes of numbers that together are exactly `numbers`."""
    lines = []
    for box in _number_boxes(list(dict.fromkeys(numbers))):
        count = 1
        fields = []
        for values in box:
            count *= len(values)
            fields.append(format_ranges(values) if len(values) == 1 else f"{{{format_ranges(values)}}}")
        lines.append(_insert_fields(template, fields) + (f" ({count})" if count > 1 else ""))
    return lines


def _number_boxes(numbers: list[Numbers]) -> list[tuple[Numbers, ...]]:
    if not numbers[0]:
        return [()]
    last: dict[Numbers, list[int]] = {}
    for entry in numbers:
        last.setdefault(entry[:-1], []).append(entry[-1])
    heads: dict[Numbers, list[Numbers]] = {}
    for head, values in last.items():
        heads.setdefault(tuple(sorted(values)), []).append(head)
    return [(*box, values) for values, members in heads.items() for box in _number_boxes(members)]


def _insert_fields(template: str, fields: list[str]) -> str:
    parts = template.split("{}")
    return parts[0] + "".join(field + part for field, part in zip(fields, parts[1:]))
