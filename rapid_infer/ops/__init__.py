"""Operators: one file per op (signature, meaning, torch reference), and providers that do the same faster.

A provider is picked when a layer is built (`Op.bind`). This is what packages of the group `rapid_infer.ops` import:
the names of `facade.py`. It is imported, and torch with it, when the first of them is asked for: `precompile/`, which
lets kernels be compiled while torch is imported, must not wait for that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rapid_infer.ops.facade import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        value = globals()[name] = getattr(import_module("rapid_infer.ops.facade"), name)
        return value
