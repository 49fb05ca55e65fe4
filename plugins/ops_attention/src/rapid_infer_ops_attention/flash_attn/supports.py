"""Where each library can run.

A layer gives `head_dim` and `block_size`; info without them are about the device alone.
"""

from __future__ import annotations

import torch

from rapid_infer.ops import OpInfo, lacks
from rapid_infer_ops_attention import installed
from rapid_infer_ops_attention.installed import not_16_bit_cuda, older_than_sm80


def cannot_run_version_3(info: OpInfo) -> list[str]:
    reasons = []
    if not installed.folders("vllm"):
        reasons.append("vllm is not installed")
    elif not installed.has("vllm", "vllm_flash_attn/_vllm_fa3_C*"):
        reasons.append("the installed vllm has no FlashAttention 3")
    reasons += _shared(info)
    if info.capability is not None and info.capability[0] != 9:
        reasons.append("needs SM 90, this GPU is SM {}{}".format(*info.capability))
    if info.extra.get("sinks") and info.dtype is torch.float16:
        reasons.append("rounds sinks to bfloat16")
    if info.extra.get("sinks") and info.extra.get("return_lse"):
        reasons.append("does not say whether its log-sum-exp counts the sinks")
    return reasons + _small_pages(info) + lacks(info, "window", "soft_cap", "sinks", "return_lse")


def cannot_run_version_4(info: OpInfo) -> list[str]:
    reasons = [] if installed.has("flash_attn", "cute/interface.py") else ["flash-attn-4 is not installed"]
    reasons += _shared(info)
    if info.capability is not None and info.capability[0] not in (9, 10, 11):
        reasons.append("has pages on SM 90 to 110, this GPU is SM {}{}".format(*info.capability))
    return reasons + _small_pages(info) + lacks(info, "window", "soft_cap", "sinks", "return_lse")


def cannot_run_version_2(info: OpInfo) -> list[str]:
    reasons = [] if installed.has("flash_attn", "flash_attn_interface.py") else ["flash-attn is not installed"]
    reasons += _shared(info)
    reasons += older_than_sm80(info)
    size = info.extra.get("block_size", 256)
    if size is None or size % 256:
        reasons.append(f"takes pages of a multiple of 256 tokens, not {size}: set block_size=256")
    return reasons + lacks(info, "window", "soft_cap", "return_lse")


def _shared(info: OpInfo) -> list[str]:
    reasons = not_16_bit_cuda(info)
    dim = info.extra.get("head_dim", 8)
    if dim % 8 or not 8 <= dim <= 256:
        reasons.append(f"takes head sizes up to 256 that are multiples of 8, not {dim}")
    return reasons


def _small_pages(info: OpInfo) -> list[str]:
    """Versions 3 and 4 load a page that holds whole tiles of keys as it lies, also beyond a row's last key.

    Weights of 0 do not save the sum from what stands there, which may be infinite or NaN. Smaller pages are read key by
    key. Tiles have 64 keys for windows of large heads, and 80 or more else.
    """
    size = info.extra.get("block_size", 16)
    tile = 64 if info.extra.get("head_dim", 0) > 192 and info.extra.get("window") else 80
    if size is None or size % 16 or size >= tile:
        return [f"takes pages of a multiple of 16 tokens below {tile}, not {size}"]
    return []
