"""Rotary position embedding: its configuration in either published form, and the one table all layers share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rapid_infer.errors import ConfigError
from rapid_infer.layers.context import BuildContext

TYPES = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Of each type, the parameters that it needs and those that it may have. What else stands there has no meaning for it,
here as in transformers.
"""


@dataclass(frozen=True)
class RopeConfig:
    """`dim`: rotated features per head. `scaling`: the parameters of `type`, as (name, value) pairs.

    `interleaved`: pairs (2i, 2i + 1) instead of (i, i + dim / 2).
    """

    theta: float
    dim: int
    type: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    interleaved: bool = False

    @classmethod
    def read(
        cls, values: Mapping[str, Any], head_dim: int, max_positions: int, interleaved: bool = False
    ) -> RopeConfig:
        """From `rope_parameters` (rope_type, rope_theta, partial_rotary_factor, the type's own).

        `max_positions` is config.json's max_position_embeddings. ConfigError for a type or value that is not supported.
        """
        kind = values.get("rope_type") or values.get("type") or "default"
        if not isinstance(kind, str) or kind not in TYPES:
            raise ConfigError(f"rope_type {kind!r} is not supported; expected one of {', '.join(TYPES)}")
        needed, optional = TYPES[kind]
        given = dict(values)
        if "original_max_position_embeddings" in needed:
            given.setdefault("original_max_position_embeddings", max_positions)
        for name in needed:
            if name not in given:
                raise ConfigError(f"rope_type {kind!r} needs {name!r}, got only {sorted(values)}")
        if kind == "yarn" and given["factor"] is None:
            given["factor"] = max_positions / _number(given, "original_max_position_embeddings")
        scaling = {name: _number(given, name) for name in needed}
        for name in optional:
            flag = name == "truncate"
            # null is as good as absent, but a flag that is null counts as false in transformers: ask for a plain one.
            if name in given and (flag or given[name] is not None):
                scaling[name] = _number(given, name, positive=False, flag=flag)
        theta = _number({"rope_theta": 10000.0, **given}, "rope_theta")
        dim = int(head_dim * _number({"partial_rotary_factor": 1.0, **given}, "partial_rotary_factor"))
        if dim % 2 or not 0 < dim <= head_dim:
            raise ConfigError(f"config.json makes RoPE turn {dim} of {head_dim} features: expected an even number")
        return cls(theta, dim, kind, tuple(sorted(scaling.items())), interleaved)

    def context_length(self, max_position_embeddings: int) -> int:
        """Tokens that the model is made for, where config.json has this `max_position_embeddings`.

        Scaling lengthens the original context by its factor. Checkpoints with llama3 give the longer one themselves.
        """
        scaling = dict(self.scaling)
        if self.type == "linear":
            return int(max_position_embeddings * scaling["factor"])
        if self.type == "yarn":
            return int(scaling["original_max_position_embeddings"] * scaling["factor"])
        return max_position_embeddings

    @property
    def score_factor(self) -> float:
        """What YaRN with `mscale_all_dim` multiplies attention scores by, beside the factor on cos and sin."""
        values = dict(self.scaling)
        everywhere = values.get("mscale_all_dim", 0.0) if self.type == "yarn" else 0.0
        return yarn_mscale(values["factor"], everywhere) ** 2 if everywhere else 1.0

    def inverse_frequencies(self) -> tuple[Tensor, float]:
        """(`[dim / 2]` fp32, factor on cos and sin)."""
        plain = 1.0 / self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        values = dict(self.scaling)
        if self.type == "linear":
            return plain / values["factor"], 1.0
        if self.type == "llama3":
            return _llama3(plain, values), 1.0
        if self.type == "yarn":
            return _yarn(plain, values, self.theta, self.dim)
        return plain, 1.0


def _llama3(plain: Tensor, values: dict[str, float]) -> Tensor:
    low, high, original = (
        values[k] for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = original * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / values["factor"] + smooth * plain


def _yarn(plain: Tensor, values: dict[str, float], theta: float, dim: int) -> tuple[Tensor, float]:
    """Source: Peng et al. 2023; high frequencies stay, low ones are interpolated, with a linear ramp between."""
    factor, original = values["factor"], values["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(values.get("beta_fast") or 32.0)
    high = dimension(values.get("beta_slow") or 1.0)
    if values.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    mscale, mscale_all = values.get("mscale", 0.0), values.get("mscale_all_dim", 0.0)
    if "attention_factor" in values:
        return frequencies, values["attention_factor"]
    if mscale and mscale_all:
        return frequencies, yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return frequencies, yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(values: Mapping[str, Any], name: str, positive: bool = True, flag: bool = False) -> float:
    value = values[name]
    good = isinstance(value, bool) if flag else isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < 0 or (positive and value == 0):
        expected = "true or false" if flag else f"a number {'>' if positive else '>='} 0"
        raise ConfigError(f"config.json has {name}={value!r} among its RoPE parameters: expected {expected}")
    return float(value)


def rope_table(ctx: BuildContext, config: RopeConfig) -> Tensor:
    """`[positions, dim]` fp32, cosines in the first half, sines in the second; one per config, shared by all layers."""
    key = (config.theta, config.dim, config.type, config.scaling)
    if key not in ctx.shared:
        with torch.device("cpu"):
            frequencies, factor = config.inverse_frequencies()
            angles = torch.outer(torch.arange(ctx.max_positions, dtype=torch.float32), frequencies)
            table = torch.cat((angles.cos(), angles.sin()), dim=-1) * factor
        ctx.shared[key] = table.to(ctx.ops.device)
    return ctx.shared[key]
