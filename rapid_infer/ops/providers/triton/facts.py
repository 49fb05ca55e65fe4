"""Where Triton kernels can run. Imports no Triton."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

from rapid_infer.ops.attention_params import lacks, lacks_kv
from rapid_infer.ops.registry import OpInfo

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run in Python on the CPU: for tests only, so such a provider is never chosen by itself."""

KV_CACHES = ("bf16", "fp8")

PRIORITY = -1 if INTERPRETED else 10


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def unavailable(info: OpInfo) -> list[str]:
    """Reasons that all Triton providers share."""
    reasons = []
    if info.device != "cuda" and not INTERPRETED:
        reasons.append(f"runs on cuda, not {info.device}")
    if not _installed():
        reasons.append("triton is not installed")
    if info.capability is not None and info.capability < (8, 0):
        reasons.append("needs SM 80 or newer, this GPU is SM {}{}".format(*info.capability))
    return reasons


def cannot_attend(info: OpInfo) -> list[str]:
    options = ("window", "soft_cap", "sinks", "return_lse")
    return unavailable(info) + lacks(info, *options, *KV_CACHES) + _no_fp8(info)


def cannot_keep(info: OpInfo) -> list[str]:
    """Reasons of other operators that read or write caches."""
    return unavailable(info) + lacks_kv(info, *KV_CACHES) + _no_fp8(info)


def _no_fp8(info: OpInfo) -> list[str]:
    old = info.extra.get("kv_cache_dtype") == "fp8" and info.capability is not None and info.capability < (8, 9)
    return ["has FP8 on SM 89 and newer"] if old else []
