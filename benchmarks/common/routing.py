"""A uniform random draw in place of routers: random weights send most tokens to the same few experts.

The draw replaces the scores, so a step does all the work of a real one and a little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rapid_infer.ops import OPS, OpInfo, OpResolver, register

PROVIDER = "uniform"
DRAWS = 20


def engine_options() -> dict[str, Any]:
    """For the engine's keyword arguments; registers the provider that they name."""
    if PROVIDER not in OPS["route_experts"].providers:
        register("route_experts", PROVIDER, priority=-100, supports=_supports)(_route)
    return {"op_priority": {"route_experts": [PROVIDER]}}


def _supports(info: OpInfo) -> Sequence[str]:
    return ()


def _real(device: torch.device) -> Any:
    """The provider that would run without the switch."""
    if device not in _bound:
        _bound[device] = OpResolver(device).bind("route_experts", torch.float32)
    return _bound[device]


_bound: dict[torch.device, Any] = {}


def _route(
    logits: Tensor,
    bias: Tensor | None,
    token_mask: Tensor | None,
    expert_map: Tensor,
    top_k: int,
    groups: int,
    top_groups: int,
    scoring: str,
    renormalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    drawn = torch.rand_like(logits)
    route = _real(logits.device)
    return route(drawn, None, token_mask, expert_map, top_k, groups, top_groups, scoring, renormalize, scale)


def experts_touched(experts: int, top_k: int, tokens: int, device: torch.device | str) -> float:
    """Experts that a layer reads for `tokens` tokens, the mean of some draws."""
    expert_map = torch.arange(experts, dtype=torch.int32, device=device)
    logits = torch.empty(tokens, experts, device=device)
    draws = (_route(logits, None, None, expert_map, top_k, 1, 1, "softmax", False, 1.0)[1] for _ in range(DRAWS))
    return sum(len(draw.unique()) for draw in draws) / DRAWS
