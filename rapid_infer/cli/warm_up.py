"""`rapid-infer warm-up`: compile a model's kernels before the first start."""

from __future__ import annotations

import sys
import time
from typing import Any

from rapid_infer.cli import options


@options.expand(
    engine_args=(
        *("tensor_parallel_size", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
        *("enforce_eager", "model_plugin", "model_impl", "hub", "revision"),
    )
)
def warm_up(
    *,
    model: options.Model = "demo",
    engine_args: dict[str, Any],
    offline: options.Offline = False,
) -> int:
    """Compile a model's GPU kernels beforehand. Example: rapid-infer warm-up Qwen/Qwen3-8B

    A first start compiles them too, on all cores, while the model is loaded; this does it ahead, for a container image
    or a machine that starts many models. Needs a GPU of the kind that will run the model, but none of its memory, and
    of a local MODEL nothing but config.json. Give the options that the engine will have: they decide what is compiled.
    Kernels go to $TRITON_CACHE_DIR, else to kernels/ in $RAPID_INFER_CACHE.
    """
    options.go_offline(offline)
    began = time.perf_counter()
    from rapid_infer.config import EngineArgs
    from rapid_infer.startup import compile_kernels, locate

    args = EngineArgs.from_kwargs(**engine_args)
    checkpoint, entry = locate(model, args)
    done = compile_kernels(checkpoint, entry, args)
    if done.error is not None:
        print(f"error: not all kernels could be compiled: {done.error}", file=sys.stderr)
        return 1
    counted = (
        "all kernels were there" if done.ready else f"{done.num_kernels} kernels, {time.perf_counter() - began:.1f} s"
    )
    print(f"{checkpoint.architecture} on {done.gpu} in {done.cache}: {counted}")
    return 0
