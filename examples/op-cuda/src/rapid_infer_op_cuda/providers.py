"""Registers the kernel as a provider of `fused_add_rms_norm`; imported with the first model, so it builds nothing."""

from __future__ import annotations

import torch

from rapid_infer.ops import OpInfo, register_lazy
from rapid_infer_op_cuda.build import cannot_build

NAME = "cuda_cpp"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cannot_run(info: OpInfo) -> list[str]:
    if info.device != "cuda":
        return [f"runs on cuda, not {info.device}"]
    reasons = []
    if info.dtype not in DTYPES:
        reasons.append(f"takes bfloat16, float16 and float32, not {str(info.dtype).removeprefix('torch.')}")
    if info.capability is not None and info.capability < (9, 0):
        reasons.append("is compiled for SM 90 and newer, this GPU is SM {}{}".format(*info.capability))
    return [*reasons, *cannot_build()]


register_lazy(
    "fused_add_rms_norm",
    NAME,
    "rapid_infer_op_cuda.norm:fused_add_rms_norm",
    # Above the runtime's own kernel, which has 10: who installs this package wants it.
    priority=20,
    supports=cannot_run,
)
