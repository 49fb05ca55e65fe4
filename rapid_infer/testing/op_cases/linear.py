"""Cases of products with a matrix and of looking up its rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rapid_infer.testing.op_cases.case import Case, cases


@cases
def embedding(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for tokens, vocab, size in ((1, 5, 64), (9, 33, 40), (40, 7, 1536)):
        weight = torch.randn(vocab, size, device=device).to(dtype)
        yield Case({"input_ids": torch.randint(vocab, (tokens,), device=device), "weight": weight})


@cases
def linear(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, inputs, outputs in ((1, 64, 96), (5, 48, 33), (40, 128, 64)):
        x = torch.randn(rows, inputs, device=device).to(dtype)
        weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).to(dtype)
        yield Case({"x": x, "weight": weight})


@cases
def linear_silu_and_mul(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, inputs, size in ((1, 64, 96), (5, 48, 33), (40, 128, 64)):
        x = torch.randn(rows, inputs, device=device).to(dtype)
        yield Case({"x": x, "weight": (torch.randn(2 * size, inputs, device=device) / inputs**0.5).to(dtype)})


@cases
def lm_head(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for rows, hidden, vocab in ((1, 64, 97), (5, 48, 300), (70, 64, 150)):
        weight = (torch.randn(vocab, hidden, device=device) / hidden**0.5).to(dtype)
        yield Case({"hidden": torch.randn(rows, hidden, device=device).to(dtype), "weight": weight})


@cases
def lm_head_argmax(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Each row has a best token that is the best in any rounding; it stands twice in the matrix."""
    for case in lm_head(dtype, device):
        hidden, weight = case.kwargs["hidden"], case.kwargs["weight"]
        direction = (hidden.float() / hidden.float().norm(dim=1, keepdim=True)).to(dtype)
        weight[: len(hidden)] = direction
        weight[-len(hidden) :] = direction
        yield case


@cases
def router_logits(dtype: torch.dtype, device: str) -> Iterator[Case]:
    for tokens, hidden, experts in ((1, 64, 8), (5, 48, 20), (70, 128, 64)):
        weight = (torch.randn(experts, hidden, device=device) / hidden**0.5).to(dtype)
        yield Case({"x": torch.randn(tokens, hidden, device=device).to(dtype), "weight": weight})
