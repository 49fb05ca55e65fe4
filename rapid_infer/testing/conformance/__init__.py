"""Does a model plugin keep what the runtime promises of every model? One list of checks, for pytest and the command.

Three lines in a test file of the package:

    from rapid_infer.testing.conformance import conformance_tests

    test_conformance = conformance_tests("rapid-infer-mymodel")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from rapid_infer.registry import Entry
from rapid_infer.testing.conformance import package, ranks, tokens
from rapid_infer.testing.conformance.case import Case, cases_of, entries_of
from rapid_infer.testing.conformance.subject import Subject

Check = Callable[[Subject], str | None]

CHECKS: tuple[Check, ...] = (
    package.config,
    package.weight_map,
    package.imports,
    package.docs,
    tokens.logits,
    tokens.stop_ids,
    tokens.batch,
    tokens.chunks,
    tokens.preemption,
    tokens.graphs,
    tokens.dtype,
    tokens.memory,
    ranks.tensor_parallel,
    ranks.expert_parallel,
    ranks.stages,
)
"""Each raises with a message when its docstring does not hold, and returns why it does not concern a model, if so."""

VARIANT_CHECKS: tuple[Check, ...] = (tokens.logits,)
"""Of the variants of a case."""


def plan(cases: Sequence[tuple[Entry, Case]]) -> list[tuple[Subject, Check]]:
    """Everything to check, in order. Nothing is made or loaded yet."""
    steps = []
    for entry, case in cases:
        whole = Subject(entry, case)
        steps += [(whole, check) for check in CHECKS]
        steps += [(Subject(entry, case, name), check) for name in case.variants for check in VARIANT_CHECKS]
    return steps


@cache
def _settle() -> None:
    """One thread: tiny matrices gain nothing from more. No progress bars, of which there would be a hundred."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()


def run(subject: Subject, check: Check) -> str | None:
    """Raises, with what is wrong, when the check fails; else why it does not concern this model, or None."""
    _settle()
    return check(subject)


def conformance_tests(distribution: str) -> Any:
    """A test function for pytest, with a case for each check of each architecture that `distribution` declares.

    PluginError when it is not installed or declares no cases (`CASES` in its module `conformance`).
    """
    import pytest

    steps = plan(cases_of(entries_of(distribution)))
    names = [f"{subject.name}-{check.__name__}" for subject, check in steps]

    @pytest.mark.parametrize(("subject", "check"), steps, ids=names)
    def test_conformance(subject: Subject, check: Check) -> None:
        run(subject, check)

    return test_conformance


__all__ = ["CHECKS", "Case", "Check", "Subject", "cases_of", "conformance_tests", "entries_of", "plan", "run"]
