"""Which model has which feature, which operator which provider, and what "auto" becomes: tables for `make_docs.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from rapid_infer.config import CheckpointInfo, DeviceInfo, EngineArgs
from rapid_infer.layers.attention import Attention
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.mla import MLAAttention
from rapid_infer.layers.moe import MoE
from rapid_infer.ops import OPS, OpResolver, load_providers
from rapid_infer.ops.registry import Provider
from rapid_infer.parallel import ParallelState
from rapid_infer.registry import Entry, ModelRegistry
from rapid_infer.testing.conformance import Case, cases_of

Table = tuple[Sequence[str], list[Sequence[object]]]

PLUGINS = ("rapid-infer-deepseek-v2", "rapid-infer-llama", "rapid-infer-qwen3")
PROVIDER_PACKAGES = ("rapid_infer", "rapid_infer_ops_attention")
FEATURES = (
    "attention", "sliding window", "norms of q and k", "biases", "RoPE scaling", "tied head", "experts",
    "tensor parallel", "expert parallel",
)  # fmt: skip


def model_features() -> Table:
    """By building each architecture, and each variant that its package declares and compares with its oracle."""
    rows = [
        _features(entry, case)
        for entry, case in cases_of([e for e in ModelRegistry.entries() if e.distribution in PLUGINS])
    ]
    columns = [f"`{entry}`" for entry, _ in rows]
    return ["", *columns], [(name, *(found[name] for _, found in rows)) for name in FEATURES]


def _features(entry: Entry, case: Case) -> tuple[str, dict[str, str]]:
    built = list(_built(entry, case))
    modules = [module for model, _ in built for module in model.modules()]
    attentions = [module for module in modules if isinstance(module, Attention)]
    scalings = {str(scaling) for _, config in built for scaling in [_rope_type(config)] if scaling != "default"}
    experts = any(isinstance(module, MoE) for module in modules)
    sizes = ", ".join(map(str, case.ranks))

    def told(condition: bool) -> str:
        return "yes" if condition else "-"

    return entry.name, {
        "attention": "MLA" if any(isinstance(module, MLAAttention) for module in modules) else "grouped queries",
        "sliding window": told(any(module.cache_spec.window for module in attentions)),
        "norms of q and k": told(any(norm is not None for module in attentions for norm in module._norms)),
        "biases": told(any(name.endswith("proj.bias") for model, _ in built for name, _ in model.named_parameters())),
        "RoPE scaling": ", ".join(sorted(scalings)) or "-",
        "tied head": told(any(config.tie_word_embeddings for _, config in built)),
        "experts": told(experts),
        "tensor parallel": f"checked at {sizes}",
        "expert parallel": told(experts),
    }


def _built(entry: Entry, case: Case) -> Iterator[tuple[Any, Any]]:
    """On the meta device, with transformers' config."""
    cls: Any = ModelRegistry.load(entry)
    for variant in ("", *case.variants):
        config = case.config(variant)
        context = BuildContext(torch.float32, OpResolver("cpu"), 128, ParallelState(), block_size=16)
        with torch.device("meta"):
            yield cls(cls.read_config(config), context), config


def _rope_type(config: Any) -> str:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")


def op_providers() -> Table:
    """Priorities; of this repository's packages, whatever else is installed."""
    load_providers()
    ours = {op.name: {p.name: p.priority for p in op.providers.values() if _ours(p)} for op in OPS.values()}
    names = sorted(
        {name for found in ours.values() for name in found},
        key=lambda name: (-sum(name in f for f in ours.values()), name),
    )
    return ["op", *names], [(f"`{op}`", *(found.get(name, "") for name in names)) for op, found in sorted(ours.items())]


def _ours(provider: Provider) -> bool:
    module = provider.target.partition(":")[0] if isinstance(provider.target, str) else provider.target.__module__
    return module.partition(".")[0] in PROVIDER_PACKAGES


def resolved_defaults() -> Table:
    """What the engine takes where nothing is said, for a model in bfloat16 of 40,960 positions."""
    devices = (
        DeviceInfo("cuda", True, 0),
        DeviceInfo("cpu", True, 0),
        DeviceInfo("cpu", False, 0),
    )
    found = [dict(_leaves(EngineArgs().resolve(CheckpointInfo(40960, "bfloat16"), device))) for device in devices]
    names = [name for name in found[0] if name in {field.name for field in fields(EngineArgs)}]
    return ["option", "GPU", "CPU with fast bfloat16", "other CPU"], [
        (f"`{name}`", *(f"`{values[name]}`" for values in found))
        for name in sorted(names)
        if getattr(EngineArgs(), name) in (None, "auto") and found[0][name] not in (None, "auto")
    ]


def _leaves(config: Any) -> Iterator[tuple[str, Any]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _leaves(value)
        else:
            yield field.name, value
