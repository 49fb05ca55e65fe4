"""oneDNN matrix products with the weight packed once: about twice as fast as torch.mm for few tokens in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rapid_infer.ops import OpInfo, register
from rapid_infer.ops.providers.cpu.supports import not_on_cpu


def _cannot(info: OpInfo) -> Sequence[str]:
    reasons = not_on_cpu(info)
    if info.dtype is not torch.bfloat16:
        # Packing gains nothing in fp32, and fp16 has no fast arithmetic on CPUs.
        reasons.append(f"packs bfloat16, not {str(info.dtype).removeprefix('torch.')}")
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        reasons.append("this CPU or torch build has no oneDNN bfloat16")
    if _linear_pointwise is None:
        reasons.append(f"torch {torch.__version__} has no packed linear")
    return reasons


# The overload itself: finding it again costs more than a microsecond a call.
_linear_pointwise: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1)


@register("linear", "onednn", priority=10, supports=_cannot, prepare=_pack)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    return _linear_pointwise(x, weight, None, "none", [], "")


@register("lm_head", "onednn", priority=10, supports=_cannot, prepare=_pack)
def lm_head(hidden: Tensor, weight: Tensor) -> Tensor:
    return linear(hidden, weight).float()


@register("lm_head_argmax", "onednn", priority=10, supports=_cannot, prepare=_pack)
def lm_head_argmax(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    value, index = linear(hidden, weight).float().max(dim=-1)
    return value, index
