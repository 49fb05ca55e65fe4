"""Attention from an installed FlashInfer; the library is imported when a layer first binds its provider."""

from __future__ import annotations

from rapid_infer.ops.providers.flashinfer import facts
from rapid_infer.ops.registry import register_lazy

# Below our own kernels: nothing that happens to be installed changes what runs, but `op_priority` can ask for it.
register_lazy(
    "paged_attention",
    "flashinfer",
    "rapid_infer.ops.providers.flashinfer.attention:paged_attention",
    priority=2,
    supports=facts.cannot_run,
    # It plans each step on the host.
    capturable=False,
)
