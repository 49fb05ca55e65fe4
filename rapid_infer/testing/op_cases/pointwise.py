"""Cases of norms and activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rapid_infer.testing.op_cases.case import Case, cases


@cases
def rms_norm(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, size in ((1, 64), (5, 576), (33, 80)):
        x, weight = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, size), (size,)))
        yield Case({"x": x, "weight": weight, "eps": 1e-6})


@cases
def fused_add_rms_norm(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for case in rms_norm(dtype, device):
        residual = torch.randn_like(case.kwargs["x"])
        yield Case({"x": case.kwargs["x"], "residual": residual, "weight": case.kwargs["weight"], "eps": 1e-6})


@cases
def silu_and_mul(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, size in ((1, 64), (7, 1536), (33, 48)):
        yield Case({"gate_up": torch.randn(rows, 2 * size, device=device).to(dtype)})
