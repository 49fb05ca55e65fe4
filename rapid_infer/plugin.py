"""The one module that plugins import: everything a model package needs, and nothing that may change under it."""

# ruff: noqa: F401
# The imports are the list of what there is.
from rapid_infer.cache.spec import MLAKV, FullKV
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
from rapid_infer.layers.mla import MLAAttention, MLAConfig
from rapid_infer.layers.mlp import GatedMLP
from rapid_infer.layers.moe import MoE, RouterConfig
from rapid_infer.layers.norm import RMSNorm
from rapid_infer.layers.parameter import Part, Placement
from rapid_infer.layers.rope import RopeConfig
from rapid_infer.layers.stack import LayerStack
from rapid_infer.loader.index_map import interleave, transpose
from rapid_infer.loader.rules import experts, ignore, rename, split, stack, tie
from rapid_infer.loader.weight_map import WeightMap
from rapid_infer.models.config_reader import ConfigReader
from rapid_infer.registry import API_VERSION
