"""What a layer's attention is besides queries and keys: settled when the layer is built, the same in every step."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from rapid_infer.ops.registry import OpInfo


@dataclass(frozen=True, eq=False, repr=False)
class AttentionParams:
    """`scale` of the scores, and options, each off by default. An option that is on is in the layer's `OpInfo`; a
    provider names those that it has (`lacks`), so that one added here is refused by all that do not know it.

    window      a query sees the last `window` keys alone, its own included
    soft_cap    scores become `cap * tanh(score / cap)`
    sinks       `[heads]` fp32, one more score per head that takes weight and gives no value
    return_lse  return the log-sum-exp as well
    kv_scales   no option: `[2, kv_heads]` fp32, what stored keys and values are multiplied by; see `kv_cache.py`
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    return_lse: bool = False
    kv_scales: Tensor | None = None

    def options(self) -> dict[str, bool]:
        """Which options are on."""
        values = ((name, getattr(self, name)) for name in OPTIONS)
        return {name: value is not None and value is not False for name, value in values}

    def __repr__(self) -> str:
        """Layers with equal ones launch the same kernels."""
        return f"AttentionParams(scale={self.scale}, window={self.window}, soft_cap={self.soft_cap}, {self.options()})"


OPTIONS = tuple(field.name for field in fields(AttentionParams) if field.name not in ("scale", "kv_scales"))


def lacks(info: OpInfo, *has: str) -> list[str]:
    """Reasons of a provider that has these options, and these values of kv_cache_dtype, and no others."""
    return [f"has no {name}" for name in OPTIONS if info.extra.get(name) and name not in has] + lacks_kv(info, *has)


def lacks_kv(info: OpInfo, *has: str) -> list[str]:
    """Reasons of a provider that reads or writes caches of the model's type, of these, and no others."""
    stored = info.extra.get("kv_cache_dtype")
    return [f"has no {stored} KV cache"] if stored and stored not in has else []
