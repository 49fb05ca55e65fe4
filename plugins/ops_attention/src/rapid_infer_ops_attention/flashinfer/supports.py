"""Where FlashInfer can run."""

from __future__ import annotations

from rapid_infer.ops import OpInfo, lacks
from rapid_infer_ops_attention import installed
from rapid_infer_ops_attention.installed import not_16_bit_cuda, older_than_sm80

HEAD_DIMS = (64, 128, 256)


def cannot_run(info: OpInfo) -> list[str]:
    reasons = []
    if not installed.has("flashinfer", "prefill.py"):
        reasons.append("flashinfer is not installed (pip install flashinfer-python)")
    reasons += not_16_bit_cuda(info) + older_than_sm80(info)
    dim = info.extra.get("head_dim", 128)
    if dim not in HEAD_DIMS:
        reasons.append(f"takes head sizes of {', '.join(map(str, HEAD_DIMS))}, not {dim}")
    return reasons + lacks(info, "window", "soft_cap", "return_lse")
