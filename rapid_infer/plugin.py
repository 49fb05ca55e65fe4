"""The one module that plugins import. Everything a model package needs, and nothing that may change under it.

Names load on first use, so that importing the facade costs a plugin nothing it does not use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rapid_infer.registry import API_VERSION

if TYPE_CHECKING:
    from rapid_infer.cache.spec import FullKV, LatentKV
    from rapid_infer.errors import ConfigError
    from rapid_infer.layers.attention import Attention, CachedModule
    from rapid_infer.layers.batch import ForwardBatch
    from rapid_infer.layers.context import BuildContext
    from rapid_infer.layers.decoder import DecoderConfig, DecoderLayer, DecoderModel
    from rapid_infer.layers.embedding import LMHead, VocabEmbedding
    from rapid_infer.layers.linear import (
        ColumnParallelLinear,
        Linear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from rapid_infer.layers.mla import LatentAttention, LatentAttentionConfig
    from rapid_infer.layers.mlp import GatedMLP
    from rapid_infer.layers.moe import MoE, RouterConfig
    from rapid_infer.layers.norm import RMSNorm
    from rapid_infer.layers.parameter import Part, Placement
    from rapid_infer.layers.rope import RopeConfig
    from rapid_infer.layers.stack import LayerStack
    from rapid_infer.loader.weight_map import (
        WeightMap,
        experts,
        ignore,
        interleave,
        rename,
        split,
        stack,
        tie,
        transpose,
    )
    from rapid_infer.models.config_reader import ConfigReader

_MODULES = {
    "rapid_infer.cache.spec": ("FullKV", "LatentKV"),
    "rapid_infer.errors": ("ConfigError",),
    "rapid_infer.layers.attention": ("Attention", "CachedModule"),
    "rapid_infer.layers.batch": ("ForwardBatch",),
    "rapid_infer.layers.context": ("BuildContext",),
    "rapid_infer.layers.decoder": ("DecoderConfig", "DecoderLayer", "DecoderModel"),
    "rapid_infer.layers.embedding": ("LMHead", "VocabEmbedding"),
    "rapid_infer.layers.linear": (
        "ColumnParallelLinear",
        "Linear",
        "MergedColumnParallelLinear",
        "QKVParallelLinear",
        "RowParallelLinear",
    ),
    "rapid_infer.layers.mla": ("LatentAttention", "LatentAttentionConfig"),
    "rapid_infer.layers.mlp": ("GatedMLP",),
    "rapid_infer.layers.moe": ("MoE", "RouterConfig"),
    "rapid_infer.layers.norm": ("RMSNorm",),
    "rapid_infer.layers.parameter": ("Part", "Placement"),
    "rapid_infer.layers.rope": ("RopeConfig",),
    "rapid_infer.layers.stack": ("LayerStack",),
    "rapid_infer.loader.weight_map": (
        "WeightMap",
        "experts",
        "ignore",
        "interleave",
        "rename",
        "split",
        "stack",
        "tie",
        "transpose",
    ),
    "rapid_infer.models.config_reader": ("ConfigReader",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "API_VERSION",
    "Attention",
    "BuildContext",
    "CachedModule",
    "ColumnParallelLinear",
    "ConfigError",
    "ConfigReader",
    "DecoderConfig",
    "DecoderLayer",
    "DecoderModel",
    "ForwardBatch",
    "FullKV",
    "GatedMLP",
    "LMHead",
    "LatentAttention",
    "LatentAttentionConfig",
    "LatentKV",
    "LayerStack",
    "Linear",
    "MergedColumnParallelLinear",
    "MoE",
    "Part",
    "Placement",
    "QKVParallelLinear",
    "RMSNorm",
    "RopeConfig",
    "RouterConfig",
    "RowParallelLinear",
    "VocabEmbedding",
    "WeightMap",
    "experts",
    "ignore",
    "interleave",
    "rename",
    "split",
    "stack",
    "tie",
    "transpose",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"rapid_infer.plugin has no {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
