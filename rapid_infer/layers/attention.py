"""Attention with its cache: from the merged QKV projection to the heads' outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from rapid_infer.cache.spec import NVFP4_GROUP, CacheSpec, FullKV
from rapid_infer.errors import ConfigError
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.module import LayerModule
from rapid_infer.layers.norm import RMSNorm
from rapid_infer.layers.rope import RopeConfig, rope_table
from rapid_infer.ops.attention_params import AttentionParams


class CachedModule(LayerModule):
    """A module with a paged cache.

    The worker groups modules by `cache_spec` and binds each one's slice of the group's tensor.
    """

    cache_spec: CacheSpec
    cache_group: int = -1
    splits_context = False
    """Whether it attends apart to what rows with several tokens held before the step. A step that is known to have no
    such row is less work then.
    """

    def bind_cache(self, group: int, cache: Tensor) -> None:
        """`cache`: this layer's slice of `spec.layout`, without the layer dimension."""
        raise NotImplementedError


class Attention(CachedModule):
    """Grouped-query causal attention over paged keys and values.

    Norms q and k per head (if given), rotates them (if `rope`), writes k and v to the cache, and attends; nothing
    else writes there. `window`, `soft_cap` and `sinks` as in `AttentionParams`. Head counts are this rank's.
    """

    kv_scales: Tensor | None

    def __init__(
        self,
        ctx: BuildContext,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        rope: RopeConfig | None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        stored = ctx.kv_cache_dtype
        if stored == "nvfp4" and head_dim % NVFP4_GROUP:
            raise ConfigError(
                f"{ctx.name}: kv_cache_dtype='nvfp4' takes heads of a multiple of {NVFP4_GROUP} features, not "
                f"{head_dim}; use 'fp8'"
            )
        self.parallel = ctx.parallel
        # The loader writes what files have; a buffer, since they need not have any.
        scales = torch.ones(2, num_kv_heads) if stored in ("fp8", "nvfp4") else None
        self.register_buffer("kv_scales", scales, persistent=False)
        self.params = AttentionParams(
            head_dim**-0.5 if scale is None else scale, window, soft_cap, sinks, kv_scales=scales
        )
        self.rope = rope
        self.table = rope_table(ctx, rope) if rope else None
        if q_norm is not None and k_norm is not None and q_norm.eps != k_norm.eps:
            raise ConfigError(f"{ctx.name}: q_norm has eps={q_norm.eps}, k_norm {k_norm.eps}; expected one value")
        self._eps = next((norm.eps for norm in (q_norm, k_norm) if norm is not None), 0.0)
        # The norms are the model's own modules; kept out of the module tree, so that their weights have one name.
        self._norms = (q_norm, k_norm)
        self.cache_spec = FullKV(num_kv_heads, head_dim, ctx.cache_dtype, window)
        self._prepare = ctx.op(
            "qk_norm_rope_kv_write", head_dim=head_dim, rotary_dim=rope.dim if rope else 0, kv_cache_dtype=stored
        )
        self._attend = ctx.op(
            "paged_attention",
            head_dim=head_dim,
            block_size=ctx.block_size,
            kv_cache_dtype=stored,
            **self.params.options(),
        )
        self.k_cache = self.v_cache = torch.empty(0)

    def bind_cache(self, group: int, cache: Tensor) -> None:
        self.cache_group = group
        self.k_cache, self.v_cache = cache.unbind(0)

    def forward(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """qkv `[tokens, (heads + 2 kv_heads) * head_dim]` -> `[tokens, heads * head_dim]`, in the last layer of the
        tokens that are asked for.
        """
        metadata = batch.attention[self.cache_group]
        q_norm, k_norm = self._norms
        q = self._prepare(
            qkv,
            batch.positions,
            self.table,
            metadata,
            self.k_cache,
            self.v_cache,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            self._eps,
            self.rope is not None and self.rope.interleaved,
            self.params.kv_scales,
        )
        out = self._attend(q, self.k_cache, self.v_cache, metadata, self.params)
        return batch.select_tokens(out.flatten(1))
