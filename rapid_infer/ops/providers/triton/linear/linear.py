"""Products of few tokens and a weight: read from memory once, at the speed of memory. Many tokens go to cuBLAS."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rapid_infer.ops.providers.triton.activation import silu_and_mul
from rapid_infer.ops.providers.triton.facts import INTERPRETED
from rapid_infer.ops.providers.triton.launch import num_multiprocessors, options
from rapid_infer.ops.providers.triton.linear.choice import choose
from rapid_infer.ops.providers.triton.linear.config import PARTIALS, SEMAPHORES, Config, padded_rows
from rapid_infer.ops.providers.triton.linear.kernels import best_kernel, block_best_kernel, dot_kernel, gemv_kernel
from rapid_infer.ops.reference.lm_head import lm_head as lm_head_op

LINE_BYTES = 128


def linear(x: Tensor, weight: Tensor) -> Tensor:
    config = chosen(x, weight)
    return F.linear(x, weight) if config is None else product(x, weight, config)


def linear_silu_and_mul(x: Tensor, weight: Tensor) -> Tensor:
    config = chosen(x, weight, gated=True)
    return silu_and_mul(F.linear(x, weight)) if config is None else product(x, weight, config, gated=True)


def lm_head(hidden: Tensor, weight: Tensor) -> Tensor:
    config = chosen(hidden, weight)
    return lm_head_op(hidden, weight) if config is None else product(hidden, weight, config, torch.float32)


def lm_head_argmax(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    config = chosen(hidden, weight)
    if config is None or config.splits > 1:
        return argmax(lm_head_op(hidden, weight))
    return product_argmax(hidden, weight, config)


def chosen(x: Tensor, weight: Tensor, gated: bool = False) -> Config | None:
    """None: the kernels cannot take these tensors, or would be slower than cuBLAS."""
    n, k = weight.shape
    if x.dim() != 2 or x.stride(1) != 1 or x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    return choose(n // (1 + gated), k, x.shape[0], x.dtype, num_multiprocessors(x.device), gated)


def product(
    x: Tensor, weight: Tensor, config: Config, out_dtype: torch.dtype | None = None, gated: bool = False
) -> Tensor:
    """x `[m, k]`, weight `[n, k]` -> `[m, n]`; gated: weight `[2 n, k]` -> `silu(first half) * second half`."""
    n = weight.shape[0] // (1 + gated)
    out = torch.empty(x.shape[0], n, dtype=out_dtype or x.dtype, device=x.device)
    _launch(x, weight, config, out, None, n, gated)
    return out


def product_argmax(x: Tensor, weight: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """The best column of `product` (value fp32 `[m]`, index int64 `[m]`), which is not written."""
    rows, n = x.shape[0], weight.shape[0]
    shape = rows, triton.cdiv(n, config.block_n)
    value = torch.empty(shape, dtype=torch.float32, device=x.device)
    index = torch.empty(shape, dtype=torch.int32, device=x.device)
    _launch(x, weight, config, value, index, n, False)
    return _best(value, index)


def argmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same of scores fp32 `[rows, n]`; infinity where a row has NaN."""
    rows, n = scores.shape
    block = 4096
    shape = rows, triton.cdiv(n, block)
    value = torch.empty(shape, dtype=torch.float32, device=scores.device)
    index = torch.empty(shape, dtype=torch.int32, device=scores.device)
    if rows:
        block_best_kernel[(shape[1], rows)](
            scores, value, index, n, scores.stride(0), BLOCK=block, num_warps=8, **options(scores)
        )
    return _best(value, index)


def _best(value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    rows, blocks = value.shape
    best = torch.empty(rows, dtype=torch.float32, device=value.device)
    token = torch.empty(rows, dtype=torch.int64, device=value.device)
    if rows:
        warps = 32 if blocks > 8192 else 8
        best_kernel[(rows,)](
            value, index, best, token, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=warps, **options(value)
        )
    return best, token


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums and semaphores, which every kernel leaves at zero; kernels of one stream take turns with them."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # Memory of a graph's pool, zeroed only when that graph runs, would be wrong for all others.
        raise RuntimeError("run a product once before capturing it in a CUDA graph: it allocates its workspace")
    return (
        torch.empty(PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(SEMAPHORES, dtype=torch.int32, device=device),
    )


def _launch(x: Tensor, weight: Tensor, config: Config, out: Tensor, index: Tensor | None, n: int, gated: bool) -> None:
    """`n` outputs a row; with `index`, out and index are `[m, blocks]` and take each block's best column."""
    m, k = x.shape
    if not config.fits(m, n, gated) or (config.splits > 1 and index is not None) or (config.gemv and m != 1):
        raise ValueError(f"{config} cannot compute {m} x {n} outputs")
    line = LINE_BYTES // weight.element_size()
    steps = triton.cdiv(k, config.block_k)
    iters = triton.cdiv(steps, config.splits)
    partial, semaphore = workspace(x.device)
    tiles = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]) if config.tma else weight
    shared = {
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLITS": config.splits,
        "STAGES": config.stages,
        "GATED": gated,
        "ARGMAX": index is not None,
        "EVEN_K": k == iters * config.splits * config.block_k,
        "num_warps": config.warps,
        **options(x),
    }
    arguments = (
        x, weight, tiles, out, out if index is None else index, partial, semaphore, m, n, k, x.stride(0), iters,
    )  # fmt: skip
    grid = (triton.cdiv(n, config.block_n), config.splits)
    if config.gemv:
        gemv_kernel[grid](*arguments, LOOP=iters > 1, EARLY=config.ahead > 0, **shared)
    else:
        dot_kernel[grid](
            *arguments,
            ROWS=padded_rows(m),
            WEIGHT_FIRST=config.weight_first,
            TMA=config.tma,
            LINES=config.ahead if k >= line else 0,
            LINE=line,
            WIDE=INTERPRETED,
            **shared,
        )
