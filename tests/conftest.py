"""For the whole suite: one thread, and Triton kernels in Triton's interpreter where there is no GPU.

Tiny models gain nothing from more threads, and on busy machines threads wait.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from rapid_infer.testing.interpreter import interpret_triton

if not torch.cuda.is_available():
    interpret_triton()
