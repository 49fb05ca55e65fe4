"""Inputs that show what an operator means, and the comparison of a provider with the reference on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rapid_infer.errors import PluginError
from rapid_infer.ops.registry import Op
from rapid_infer.registry import load_target

TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 4e-2, "rtol": 4e-2},
    torch.float16: {"atol": 5e-3, "rtol": 5e-3},
}
"""A few roundings of the dtype, on values of order one to ten."""


@dataclass(frozen=True)
class Case:
    """Keyword arguments of one call, and what a layer would have bound with."""

    kwargs: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)


Cases = Callable[[torch.dtype, str], Iterator[Case]]
"""From a dtype and a device's name."""

_CASES: dict[str, Cases] = {}


def cases(function: Cases) -> Cases:
    """The decorated function gives the cases of this package's op of the same name."""
    _CASES[function.__name__] = function
    return function


def cases_of(op: Op, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """All cases of an op. PluginError where it has none, or what its `cases` names cannot be imported."""
    if op.cases is not None:
        function: Any = load_target(op.cases)
    elif (function := _CASES.get(op.name)) is None:
        raise PluginError(f"op {op.name} has no test cases: name them, @op(cases='my_package.op_cases:{op.name}')")
    return function(dtype, device)


def check(op: Op, provider: str, case: Case, dtype: torch.dtype) -> None:
    """AssertionError unless the provider gives and writes what the reference does in fp32; the case stays as it is."""
    expected_args = {name: _widen(value) for name, value in case.kwargs.items()}
    got_args = {name: value.clone() if isinstance(value, Tensor) else value for name, value in case.kwargs.items()}
    if (prepare := op.providers[provider].prepare) is not None:
        assert op.prepared is not None
        got_args[op.prepared] = prepare(got_args[op.prepared])
    expected = op.reference(**expected_args)
    got = op.providers[provider].fn(**got_args)
    pairs = [(expected_args[name], got_args[name]) for name in op.mutates]
    if expected is not None:
        pairs += list(zip(expected, got)) if isinstance(expected, tuple) else [(expected, got)]
    assert isinstance(got, tuple) == isinstance(expected, tuple)
    for want, have in pairs:
        assert have.shape == want.shape
        torch.testing.assert_close(have.float(), want.float(), **TOLERANCE[dtype])


def _widen(value: Any) -> Any:
    """A copy for the reference: fp32 where the op computes."""
    if not isinstance(value, Tensor):
        return value
    return value.float() if value.is_floating_point() and value.itemsize > 1 else value.clone()
