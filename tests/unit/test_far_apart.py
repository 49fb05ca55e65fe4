"""Triton kernels where 32 bits do not count far enough: in distances between elements, and in programs of a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rapid_infer.ops import OPS, load_providers
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.ops.providers.triton.attention import prefill as attention_prefill
from rapid_infer.ops.providers.triton.attention import prefill_plan as attention_prefill_plan
from rapid_infer.ops.providers.triton.mla import context as mla_context
from rapid_infer.ops.providers.triton.mla import prefill as mla_prefill
from rapid_infer.testing.op_cases import Case, cases_of
from rapid_infer.testing.op_cases.attention import make_metadata

load_providers()

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lays tensors out over more memory than a GPU has")

BEYOND = 2**31
MOST_PROGRAMS = 65_535
"""On every axis of a launch but the first."""

FAR = {
    "rms_norm": ("x",),
    "fused_add_rms_norm": ("x",),
    "silu_and_mul": ("gate_up",),
    "embedding": ("weight",),
    "linear": ("x",),
    "linear_silu_and_mul": ("x",),
    "lm_head": ("hidden",),
    "lm_head_argmax": ("hidden",),
    "router_logits": ("x",),
    "route_experts": ("logits",),
    "fused_experts": ("x", "shared"),
    "qk_norm_rope_kv_write": ("qkv", "k_cache", "v_cache"),
    "paged_attention": ("q", "k_cache", "v_cache"),
    "mla_kv_write": ("q", "kv", "cache"),
    "mla_decode": ("cache",),
    "mla_context": ("q", "cache"),
    "mla_prefill": ("q_nope", "q_rope", "kv", "key"),
    "truncate_logits": ("logits",),
    "gumbel_argmax": ("logits",),
    "decode_inputs": ("ring",),
    "mixed_inputs": ("ring",),
    "commit_tokens": ("results",),
}
"""Per op the arguments that may have gaps, between their tokens, rows or blocks."""


@pytest.fixture
def far_apart(tmp_path: Path) -> Iterator[Callable[[Tensor], Tensor]]:
    """The same numbers, half of them 2^31 elements or more from the first, in a file that is mostly a hole.

    Before the first there is a hole of that size too: a distance that has lost its upper bits ends there, in zeros.
    """

    def spread(tensor: Tensor) -> Tensor:
        gap = 2 * BEYOND // (len(tensor) - 1) // 64 * 64
        file = str(tmp_path / str(len(list(tmp_path.iterdir()))))
        hole = torch.from_file(file, shared=True, size=BEYOND + gap * len(tensor), dtype=tensor.dtype)
        spread = hole.as_strided(tensor.shape, (gap, *tensor[0].contiguous().stride()), BEYOND)
        return spread.copy_(tensor)

    yield spread
    for file in tmp_path.iterdir():
        file.unlink()


def has_gaps(case: Case, names: tuple[str, ...]) -> bool:
    """Whether each of these arguments has several tokens, rows or blocks.

    Rows of one token that attend are few, so their queries are not meant to be far apart.
    """
    tensors = [value for name in names if (value := case.kwargs[name]) is not None]
    metadata, writes = case.kwargs.get("metadata"), "positions" in case.kwargs
    chunks = metadata is None or writes or "cache" in names[0] or metadata.max_query_len > 1 < len(metadata.rows)
    return chunks and all(len(tensor) > 2 for tensor in tensors)


@pytest.mark.parametrize("name", FAR)
def test_elements_may_lie_further_apart_than_32_bits_count(name: str, far_apart: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    op = OPS[name]
    case = next(case for case in cases_of(op, torch.float16, "cpu") if has_gaps(case, FAR[name]))
    near, far = (
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in case.kwargs.items()}
        for _ in range(2)
    )
    for key in FAR[name]:
        if far[key] is None:
            continue
        # Those that write to a cache take it as slots.
        slots = "cache" in key and key in op.mutates
        far[key] = far_apart(far[key].flatten(0, 1) if slots else far[key]).view(far[key].shape)
    expected, got = op.reference(**near), op.providers["triton"].fn(**far)
    pairs = [(near[key], far[key]) for key in op.mutates]
    if expected is not None:
        pairs += list(zip(expected, got)) if isinstance(expected, tuple) else [(expected, got)]
    for want, have in pairs:
        torch.testing.assert_close(have, want, atol=5e-3, rtol=5e-3)


def test_rows_of_one_token_may_lie_further_apart_than_32_bits_count(far_apart: Callable[[Tensor], Tensor]) -> None:
    """Of 128 heads of 576 features, 29,127 do. Here a distance has 32 bits, and only a product more."""
    torch.manual_seed(0)
    metadata, blocks = make_metadata([40, 7, 64, 33, 20], [1] * 5, 16, "cpu")
    q = torch.randn(5, 4, 24).half()
    cache, out = torch.randn(blocks, 16, 24).half(), torch.zeros(2, 5, 4, 16).half()
    far = far_apart(q)
    assert far.stride(0) < BEYOND < far.stride(0) * 4
    OPS["mla_decode"].reference(q, cache, metadata, 0.2, 16, out[0])
    OPS["mla_decode"].providers["triton"].fn(far, cache, metadata, 0.2, 16, out[1])
    torch.testing.assert_close(out[1], out[0], atol=5e-3, rtol=5e-3)
    pages = torch.randn(2, blocks, 16, 2, 24).half()
    expected, got = (
        fn(rows, *pages, metadata, AttentionParams(0.2))
        for fn, rows in ((OPS["paged_attention"].reference, q), (OPS["paged_attention"].providers["triton"].fn, far))
    )
    torch.testing.assert_close(got, expected, atol=5e-3, rtol=5e-3)


class Launches:
    """In place of a kernel: notes the programs it would have been launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *args, **kwargs: None


def test_a_step_may_have_more_tiles_than_an_axis_has_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one token, as many heads or exact products make them."""
    launches = Launches()
    for module, kernel in (
        (attention_prefill, "_prefill_kernel"),
        (attention_prefill_plan, "_plan_kernel"),
        (mla_context, "_context_kernel"),
        (mla_prefill, "_prefill_kernel"),
    ):
        monkeypatch.setattr(module, kernel, launches)
    tokens, heads = 2 * MOST_PROGRAMS, 128
    metadata, blocks = make_metadata([tokens], [tokens], 1024, "cpu")

    def empty(*shape: int) -> Tensor:
        return torch.empty(1, dtype=torch.float16).expand(shape)

    def rows(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float16).expand(tokens, *shape)

    cache: Any = torch.empty(1, 1024, 1, 16, dtype=torch.float16).expand(blocks, -1, -1, -1)
    params = AttentionParams(1.0)
    OPS["paged_attention"].providers["triton"].fn(rows(heads, 16), cache, cache, metadata, params)
    latent = torch.empty(1, 1024, 40, dtype=torch.float16).expand(blocks, -1, -1)
    mla_context.mla_context(rows(heads, 40), latent, metadata, 1.0, 32, empty(1), empty(1))
    parts = rows(heads, 16), rows(heads, 8), rows(heads, 32), rows(8)
    mla_prefill.mla_prefill(*parts, metadata, 1.0, rows(heads, 16), None)
    assert len(launches.grids) == 5
    assert max(grid[0] for grid in launches.grids) > MOST_PROGRAMS
    assert all(max(grid[1:], default=1) <= MOST_PROGRAMS for grid in launches.grids)
