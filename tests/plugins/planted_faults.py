"""Qwen3 with one mistake each that an author can make; `test_planted_faults.py` has the suite find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rapid_infer_qwen3.model import Qwen3ForCausalLM, QwenAttention
from torch import Tensor

from rapid_infer.plugin import Attention, QKVParallelLinear, WeightMap, ignore


class Changed(QwenAttention):
    """Attention built anew with other arguments."""

    def __init__(self, config: Any, ctx: Any, window: Any, **arguments: Any) -> None:
        super().__init__(config, ctx, window)
        qkv = self.qkv_proj
        given = {"rope": config.rope, "q_norm": self.q_norm, "k_norm": self.k_norm, **arguments}
        self.attn = Attention(ctx.sub("attn"), qkv.num_heads, qkv.num_kv_heads, config.head_dim, **given)


class QNormDropped(Qwen3ForCausalLM):
    weight_map = WeightMap([ignore("**.q_norm.*", "left out")]) + Qwen3ForCausalLM.weight_map

    def attention(self, config: Any, ctx: Any, number: int) -> Any:
        module = Changed(config, ctx, None, q_norm=None)
        module.q_norm = None
        return module


class WrongRope(Qwen3ForCausalLM):
    def attention(self, config: Any, ctx: Any, number: int) -> Any:
        return Changed(config, ctx, None, rope=replace(config.rope, interleaved=True))


class SecondScaling(Qwen3ForCausalLM):
    def attention(self, config: Any, ctx: Any, number: int) -> Any:
        return Changed(config, ctx, None, scale=config.head_dim**-0.5 * config.head_dim**-0.5)


class TwiceTheMLP(Qwen3ForCausalLM):
    def feed_forward(self, config: Any, ctx: Any, number: int) -> Any:
        module = super().feed_forward(config, ctx, number)
        if number == 1:
            module.register_forward_hook(lambda module, args, result: 2 * result)
        return module


class InTurns(QKVParallelLinear):
    """Deals KV heads out in turns instead of repeating each for the ranks whose queries use it."""

    def __init__(self, ctx: Any, in_features: int, heads: int, kv_heads: int, dim: int, bias: bool = False) -> None:
        super().__init__(ctx, in_features, heads, kv_heads, dim, bias)
        if ctx.parallel.tp_size > kv_heads:
            q, k, v = self.layout.outs
            start = ctx.parallel.tp_rank % kv_heads * dim
            self.layout = replace(self.layout, outs=(q, replace(k, start=start), replace(v, start=start)))


class HeadNotReplicated(Qwen3ForCausalLM):
    def attention(self, config: Any, ctx: Any, number: int) -> Any:
        module = super().attention(config, ctx, number)
        module.qkv_proj = InTurns(
            *(ctx.sub("qkv_proj"), config.hidden_size, config.num_attention_heads, config.num_key_value_heads),
            config.head_dim,
        )
        return module


def _reads_on_host(read: Callable[[Tensor], object]) -> type:
    class ReadsOnHost(Qwen3ForCausalLM):
        def forward(self, batch: Any) -> Any:
            hidden = super().forward(batch)
            read(hidden)
            return hidden

    return ReadsOnHost


ReadsAnItem = _reads_on_host(lambda hidden: hidden.sum().item())
ReadsAList = _reads_on_host(lambda hidden: hidden[0].tolist())
ReadsACopy = _reads_on_host(lambda hidden: hidden.cpu())
Decides = _reads_on_host(lambda hidden: 1 if hidden.sum() > 0 else 0)
TakesByMask = _reads_on_host(lambda hidden: hidden[hidden > 0])


class ReadsByHand(Qwen3ForCausalLM):
    @staticmethod
    def read_config(hf_config: Any) -> Any:
        size = int(hf_config.head_dim)
        return replace(Qwen3ForCausalLM.read_config(hf_config), head_dim=size)
