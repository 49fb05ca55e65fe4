"""The least time a workload can take on a device: bytes over bandwidth or arithmetic over its peak, step by step.

Prompts first, all their arithmetic at peak; then one step per token, which reads the weights once and the cache of
every row that is still there. No launch, no gap, nothing else is counted, so no engine reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.workloads import Request


@dataclass(frozen=True)
class Peak:
    """What a device was measured to do: bytes a second of a copy, read and written, and 16-bit operations a second."""

    bandwidth: float
    operations: float


MEASURED = {"NVIDIA H200": Peak(4.3e12, 780e12)}
"""By what the driver calls the device; bf16, random data."""


@dataclass(frozen=True)
class DenseModel:
    """Sizes of a model whose every weight takes part in every token."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def read(cls, config: dict[str, Any]) -> DenseModel | None:
        """None for models with experts or MLA."""
        if any(name in config for name in ("num_experts", "n_routed_experts", "kv_lora_rank")):
            return None
        heads = config["num_attention_heads"]
        return cls(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["intermediate_size"],
            heads,
            config.get("num_key_value_heads", heads),
            config.get("head_dim", config["hidden_size"] // heads),
            config["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (qkv + self.heads * self.head_dim + 3 * self.intermediate)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def cache_bytes(self) -> int:
        """Of one token in 16 bits."""
        return self.layers * self.kv_heads * self.head_dim * 4

    def attention_operations(self, keys: int) -> int:
        return self.layers * self.heads * self.head_dim * 4 * keys


def floor_seconds(model: DenseModel, requests: Sequence[Request], peak: Peak) -> float:
    """For requests that are all there from the start, as (prompt, number of new tokens).

    What all prompts begin with is computed, and read, once.
    """
    body = model.layers * model.layer_weights
    seconds, shared = 0.0, _shared(requests)
    for nth, (prompt, _) in enumerate(requests):
        start = shared if nth else 0
        keys = (len(prompt) - start) * (len(prompt) + start) // 2
        operations = 2 * body * (len(prompt) - start) + model.attention_operations(keys) + 2 * model.head_weights
        seconds += operations / peak.operations
    for done in range(1, max(m for _, m in requests)):
        lengths = [len(prompt) + done for prompt, m in requests if m > done]
        rows, keys = len(lengths), sum(lengths)
        # Rows that share a prefix read it once.
        read = keys - shared * (rows - 1)
        moved = 2 * (body + model.head_weights) + model.cache_bytes * read
        operations = 2 * (body + model.head_weights) * rows + model.attention_operations(keys)
        seconds += max(moved / peak.bandwidth, operations / peak.operations)
    return seconds


def _shared(requests: Sequence[Request]) -> int:
    """Tokens that all prompts begin with, if there are several."""
    first = requests[0][0]
    if len(requests) == 1:
        return 0
    return next(
        (i for i, tokens in enumerate(zip(*(prompt for prompt, _ in requests))) if len(set(tokens)) > 1), len(first)
    )
