"""Triton kernels without a GPU, in Triton's interpreter."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any


def interpret_triton() -> None:
    """Have kernels interpreted; before any is imported. Nothing happens where Triton is not installed."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        # Triton 3.6 counts loops with `int(array([n]))`, which numpy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend
