"""Registers the libraries' attention as providers of `paged_attention`.

`vllm_flash_attn` is FlashAttention 3 as vLLM builds it, `flash_attn` version 2, `flash_attn_4` version 4 (CuTe DSL).
"""

from __future__ import annotations

from rapid_infer.ops import register_lazy
from rapid_infer_ops_attention.flash_attn import supports as flash_attn
from rapid_infer_ops_attention.flashinfer import supports as flashinfer

NAMES = ("vllm_flash_attn", "flash_attn_4", "flash_attn", "flashinfer")

_HERE = "rapid_infer_ops_attention"

# Below the runtime's own kernels: what happens to be installed changes nothing, but `op_priority` can ask for it.
register_lazy(
    "paged_attention",
    "vllm_flash_attn",
    f"{_HERE}.flash_attn.version_3:paged_attention",
    priority=5,
    supports=flash_attn.cannot_run_version_3,
)
register_lazy(
    "paged_attention",
    "flash_attn_4",
    f"{_HERE}.flash_attn.version_4:paged_attention",
    priority=4,
    supports=flash_attn.cannot_run_version_4,
)
register_lazy(
    "paged_attention",
    "flash_attn",
    f"{_HERE}.flash_attn.version_2:paged_attention",
    priority=3,
    supports=flash_attn.cannot_run_version_2,
)
register_lazy(
    "paged_attention",
    "flashinfer",
    f"{_HERE}.flashinfer.attention:paged_attention",
    priority=2,
    supports=flashinfer.cannot_run,
    # It plans each step on the host.
    capturable=False,
)
