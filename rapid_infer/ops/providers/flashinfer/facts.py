"""Where FlashInfer can run. Looks for its files and imports none of them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from rapid_infer.ops.registry import OpFacts

HEAD_DIMS = (64, 128, 256)


@cache
def _is_installed() -> bool:
    spec = find_spec("flashinfer")
    return spec is not None and any(
        (Path(folder) / "prefill.py").exists() for folder in spec.submodule_search_locations or ()
    )


def cannot_run(facts: OpFacts) -> list[str]:
    reasons = [] if _is_installed() else ["flashinfer is not installed (pip install flashinfer-python)"]
    if facts.device != "cuda":
        reasons.append(f"runs on cuda, not {facts.device}")
    if facts.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"takes bfloat16 and float16, not {str(facts.dtype).removeprefix('torch.')}")
    if facts.capability is not None and facts.capability < (8, 0):
        reasons.append("needs SM 80 or newer, this GPU is SM {}{}".format(*facts.capability))
    dim = facts.extra.get("head_dim", 128)
    if dim not in HEAD_DIMS:
        reasons.append(f"takes head sizes of {', '.join(map(str, HEAD_DIMS))}, not {dim}")
    if facts.extra.get("sinks"):
        reasons.append("has no sinks")
    if facts.extra.get("cuda_graphs"):
        reasons.append("plans each step on the host, which a CUDA graph cannot record: set enforce_eager=True")
    return reasons
