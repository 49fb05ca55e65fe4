"""Which attention libraries are there, by their files: none is imported before a layer binds its provider."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from rapid_infer.ops import OpInfo


@cache
def folders(package: str) -> tuple[Path, ...]:
    """Where a top-level package lies; several when it is spread over distributions."""
    spec = find_spec(package)
    return () if spec is None else tuple(map(Path, spec.submodule_search_locations or ()))


@cache
def has(package: str, pattern: str) -> bool:
    return any(next(folder.glob(pattern), None) is not None for folder in folders(package))


def not_16_bit_cuda(info: OpInfo) -> list[str]:
    """Why a library that takes bfloat16 and float16 on a CUDA device cannot run."""
    reasons = []
    if info.device != "cuda":
        reasons.append(f"runs on cuda, not {info.device}")
    if info.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"takes bfloat16 and float16, not {str(info.dtype).removeprefix('torch.')}")
    return reasons


def older_than_sm80(info: OpInfo) -> list[str]:
    if info.capability is not None and info.capability < (8, 0):
        return ["needs SM 80 or newer, this GPU is SM {}{}".format(*info.capability)]
    return []
