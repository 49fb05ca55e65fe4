"""`rapid-infer warm-up`: compile a model's kernels before the first start."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from rapid_infer.cli import options
from rapid_infer.errors import ConfigError


def warm_up(
    model: options.Model = "demo",
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "--tp", help="Ranks the model will run on.")
    ] = 1,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that will run at once.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of one step.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of one cache block.")] = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", metavar="", help="For steps without graphs.")
    ] = False,
    model_plugin: options.ModelPlugin = None,
    hub: options.Hub = "auto",
    revision: options.Revision = None,
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
    from rapid_infer.llm_engine import configure, locate
    from rapid_infer.worker.kernel_compiler import KernelCompiler, terminal_count

    args = EngineArgs.from_kwargs(
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        enforce_eager=enforce_eager,
        model_plugin=model_plugin,
        hub=hub,
        revision=revision,
    )
    checkpoint, entry = locate(model, args)
    with KernelCompiler(checkpoint.path, entry, args) as compiler:
        model_class, config = configure(checkpoint, entry, args)
        import torch

        from rapid_infer.device import gpu_facts

        gpu = gpu_facts(torch.device(config.device))
        if gpu is None or compiler.kernels is None:
            raise ConfigError(
                f"warm-up compiles kernels for a GPU, and this process sees {'none' if gpu is None else 'no Triton'}; "
                f"run it on a machine with a GPU of the kind that will run the model"
            )
        ready = compiler.kernels.complete(gpu)
        compiler.aim(config, model_class.read_config(checkpoint.hf_config), gpu)
        done = compiler.wait(terminal_count)
    where = f"{checkpoint.architecture} on {gpu.name} in {compiler.kernels.cache}"
    if done.error is not None:
        print(f"error: not all kernels could be compiled: {done.error}", file=sys.stderr)
        return 1
    counted = "all kernels were there" if ready else f"{done.total} kernels, {time.perf_counter() - began:.1f} s"
    print(f"{where}: {counted}")
    return 0
