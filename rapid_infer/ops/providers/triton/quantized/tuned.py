"""Configurations measured on an H200 in bf16 with `benchmarks/tune_linear.py --format`."""

from __future__ import annotations

from rapid_infer.ops.providers.triton.quantized.config import Config

TUNED: dict[tuple[str, int, int, int, int, bool], Config | None] = {}
"""By form, group, outputs, inputs, 1 or the padded rows, and whether gated; None: in 16 bits, by cuBLAS."""
