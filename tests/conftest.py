"""For the whole suite: one thread, and Triton kernels in Triton's interpreter where there is no GPU.

Tiny models gain nothing from more threads, and on busy machines threads wait.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from importlib.util import find_spec
from typing import Any

import torch


def _mend_interpreter() -> None:
    """Triton 3.6 counts loops with `int(array([n]))`, which numpy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton") is not None:
        _mend_interpreter()
