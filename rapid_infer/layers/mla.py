"""Multi-head latent attention: keys and values of all heads out of one small latent, which is all that is cached.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.cache.spec import MLAKV
from rapid_infer.errors import ConfigError
from rapid_infer.layers.attention import CachedModule
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.layout import MatrixLayout, cut, whole
from rapid_infer.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from rapid_infer.layers.matrix import MatrixModule
from rapid_infer.layers.norm import RMSNorm
from rapid_infer.layers.rope import RopeConfig, rope_table
from rapid_infer.ops.reference.kv_cache import load_latents
from rapid_infer.parallel.partial_sum import PartialSum

LATENT_EPS = 1e-6
"""Of the norms of both latents, whatever `rms_norm_eps` says: the published models were trained so."""


@dataclass(frozen=True)
class MLAConfig:
    """Sizes as the published configs name them. `q_lora_rank` None: queries come straight from the hidden state."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig

    @property
    def scale(self) -> float:
        """Of the scores: one over the root of a key's size, and YaRN's factor."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.score_factor


class MLAUpProjection(MatrixModule):
    """W `[heads * (nope + v), rank]`: each head's key matrix, then its value matrix; cut by heads.

    Decoding multiplies queries and results by it instead of the cached latents (absorption), so its format is asked for
    the matrix itself: after loading, `matrix` is W in the model's dtype, and `key` `[heads, nope, rank]` and `value`
    `[heads, rank, v]` are views of it.
    """

    def __init__(self, ctx: BuildContext, heads: int, nope: int, v: int, rank: int) -> None:
        layout, quant = MatrixLayout((cut(ctx, None, heads * (nope + v)),), whole(None, rank)), ctx.quant_method()
        super().__init__(ctx, layout, quant.params(ctx.dtype), quant=quant)
        self.quant, self.nope = quant, nope
        self.heads = ctx.parallel.split(heads, "num_attention_heads")
        self.matrix = self.key = self.value = torch.empty(0)

    def forward(self, latent: Tensor) -> Tensor:
        """`[tokens, rank]` -> keys and values `[tokens, heads, nope + v]`."""
        return F.linear(latent, self.matrix).unflatten(1, (self.heads, -1))

    def finalize_weights(self) -> None:
        self.matrix = self.quant.dequantize(self)
        for param in self.parameters():
            if param.untyped_storage().data_ptr() != self.matrix.untyped_storage().data_ptr():
                param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        by_head = self.matrix.unflatten(0, (self.heads, -1))
        self.key, self.value = by_head[:, : self.nope], by_head[:, self.nope :].transpose(1, 2)


class MLAAttention(CachedModule):
    """From hidden states `[tokens, hidden]` to the same, with all of the layer's projections.

    Tokens that are alone in their row, and what rows with several held before the step, are absorbed: one product with
    the key matrices before, one with the value matrices after. What a step's tokens see of each other is materialised.

    The cached latent is the same on every rank, and so are the projections down to it and to the query latent
    (`qkv_a_proj`, one matrix for both); what belongs to a head is cut by heads: queries, `kv_b_proj`, `o_proj`. Without
    a query latent, `qkv_a_proj` holds this rank's query heads in its place. `defer`: see `RowParallelLinear`.
    """

    splits_context = True

    def __init__(self, ctx: BuildContext, config: MLAConfig, defer: bool = False) -> None:
        super().__init__()
        self.config = config
        tp, hidden, heads = ctx.parallel, config.hidden_size, config.num_attention_heads
        nope, rope, rank, q_rank = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.kv_lora_rank,
            config.q_lora_rank,
        )
        self.num_heads = tp.split(heads, "num_attention_heads")
        a_ctx, latent = ctx.sub("qkv_a_proj"), whole("kv_a", rank + rope)
        self.q_a_layernorm: RMSNorm | None = None
        self.q_b_proj: ColumnParallelLinear | None = None
        if q_rank is None:
            self.qkv_a_proj = Linear(a_ctx, hidden, [cut(a_ctx, "q", heads * (nope + rope)), latent])
        else:
            self.qkv_a_proj = Linear(a_ctx, hidden, [whole("q_a", q_rank), latent])
            self.q_a_layernorm = RMSNorm(ctx.sub("q_a_layernorm"), q_rank, LATENT_EPS)
            self.q_b_proj = ColumnParallelLinear(ctx.sub("q_b_proj"), q_rank, heads * (nope + rope))
        self.kv_a_layernorm = RMSNorm(ctx.sub("kv_a_layernorm"), rank, LATENT_EPS)
        self.kv_b_proj = MLAUpProjection(ctx.sub("kv_b_proj"), heads, nope, config.v_head_dim, rank)
        self.o_proj = RowParallelLinear(ctx.sub("o_proj"), heads * config.v_head_dim, hidden, defer=defer)
        self.scale = config.scale
        self.table = rope_table(ctx, config.rope)
        stored = ctx.kv_cache_dtype
        if stored == "nvfp4":
            raise ConfigError(f"{ctx.name}: kv_cache_dtype='nvfp4' has no form for latents; use 'fp8' or 'auto'")
        self.cache_spec = MLAKV(rank, rope, ctx.cache_dtype)
        self.cache = torch.empty(0)
        self._write = ctx.op("mla_kv_write", rank=rank, rope_dim=rope, kv_cache_dtype=stored)
        info = {"rank": rank, "rope_dim": rope, "block_size": ctx.block_size, "kv_cache_dtype": stored}
        self._decode, self._context = ctx.op("mla_decode", **info), ctx.op("mla_context", **info)
        self._prefill = ctx.op("mla_prefill", nope_dim=nope, rope_dim=rope, v_dim=config.v_head_dim)

    def bind_cache(self, group: int, cache: Tensor) -> None:
        self.cache_group, self.cache = group, cache

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor | PartialSum:
        metadata, config, tokens = batch.attention[self.cache_group], self.config, x.shape[0]
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        down = self.qkv_a_proj(x)
        q, kv = down[:, : -(rank + rope)], down[:, -(rank + rope) :]
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.unflatten(1, (self.num_heads, config.qk_nope_head_dim + rope))
        q_nope = q[..., : config.qk_nope_head_dim]
        query = x.new_empty(tokens, self.num_heads, rank + rope)
        weight, rotated = self.kv_a_layernorm.weight, config.rope.interleaved
        self._write(q, kv, batch.positions, self.table, metadata, self.cache, weight, LATENT_EPS, rotated, query)
        # In the graph of a mixed step nothing but the device knows which rows have several tokens, and what they held.
        several = metadata.decodes is not None or metadata.num_decodes < tokens
        absorbed = min(metadata.num_decodes, tokens) if metadata.max_context_len == 0 else tokens
        heads, lse = x.new_empty(tokens, self.num_heads, config.v_head_dim), None
        if absorbed:
            _per_head(q_nope[:absorbed], self.kv_b_proj.key, query[:absorbed, :, :rank])
            latent = x.new_empty(absorbed, self.num_heads, rank)
            if metadata.num_decodes:
                self._decode(query, self.cache, metadata, self.scale, rank, latent)
            if several and metadata.max_context_len != 0:
                lse = x.new_empty(tokens, self.num_heads, dtype=torch.float32)
                self._context(query, self.cache, metadata, self.scale, rank, latent, lse)
            _per_head(latent, self.kv_b_proj.value, heads[:absorbed])
        if several:
            # Made once and used by many, which saves two thirds of the arithmetic of absorbed ones.
            # As the cache has them, so that it makes no difference which tokens came in which step.
            entries = load_latents(self.cache.flatten(0, 1).index_select(0, metadata.slots), rank, rope, x.dtype)
            kv = self.kv_b_proj(entries[:, :rank])
            self._prefill(q_nope, query[..., rank:], kv, entries[:, rank:], metadata, self.scale, heads, lse)
        return self.o_proj(batch.select_tokens(heads.flatten(1)))


def _per_head(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """`out[:, h] = x[:, h] @ matrices[h]`; x and out `[tokens, heads, *]` may have gaps between heads."""
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
