"""Attention from installed FlashAttention libraries; a library is imported when a layer first binds its provider.

`vllm_flash_attn` is FlashAttention 3 as vLLM builds it, `flash_attn` version 2, `flash_attn_4` version 4 (CuTe DSL).
"""

from __future__ import annotations

from rapid_infer.ops.providers.flash_attn import facts
from rapid_infer.ops.registry import register_lazy

_HERE = "rapid_infer.ops.providers.flash_attn"

# Below our own kernels: nothing that happens to be installed changes what runs, but `op_priority` can ask for it.
register_lazy(
    "paged_attention",
    "vllm_flash_attn",
    f"{_HERE}.version_3:paged_attention",
    priority=5,
    supports=facts.cannot_run_version_3,
)
register_lazy(
    "paged_attention",
    "flash_attn_4",
    f"{_HERE}.version_4:paged_attention",
    priority=4,
    supports=facts.cannot_run_version_4,
)
register_lazy(
    "paged_attention",
    "flash_attn",
    f"{_HERE}.version_2:paged_attention",
    priority=3,
    supports=facts.cannot_run_version_2,
)
