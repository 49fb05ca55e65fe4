"""Imports all that finding and compiling kernels needs, before it is known what to compile for."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

from rapid_infer.ops.registry import OPS, load_providers


def import_all() -> None:
    """Afterwards this process may fork: it has no other thread."""
    import triton.backends.nvidia.compiler
    import triton.compiler  # noqa: F401

    # No pool of threads that a fork would cut off.
    torch.set_num_threads(1)
    import_dynamo_when_needed()
    load_providers()
    for provider in (provider for op in OPS.values() for provider in op.providers.values()):
        if isinstance(provider.target, str) and ".triton." in provider.target:
            _ = provider.fn
    # For the first choice on "meta" torch imports hundreds of modules.
    torch.where(torch.empty(1, device="meta") > 0, 1.0, 0.0)


def import_dynamo_when_needed() -> None:
    """Operators on "meta" import torch._dynamo to say that it is to leave them alone, which takes two seconds.

    A module in its place answers that, and gives way to the real one as soon as anything else is asked of it.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        return
    place = ModuleType(name)

    def real(attribute: str) -> Any:
        if sys.modules.get(name) is place:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    vars(place).update(disable=lambda fn, *args, **kwargs: fn, __getattr__=real)
    sys.modules[name] = torch._dynamo = place
