"""The kernel against the operator's reference. Needs a GPU and nvcc; elsewhere each test says why it is skipped."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rapid_infer.ops import OPS, OpInfo, OpResolver
from rapid_infer.testing.op_cases import TOLERANCE, Case, cases_of, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESOLVER = OpResolver(DEVICE)
OP = OPS["fused_add_rms_norm"]
REASONS = OP.providers["cuda_cpp"].reasons(OpInfo.of(DEVICE, torch.bfloat16))
pytestmark = pytest.mark.skipif(bool(REASONS), reason="; ".join(REASONS))

# Rows of whole packs and of single values, as long as a block has threads and longer.
SHAPES = [(1, 4096), (257, 4096), (3, 20000), (5, 1001), (2, 5003), (0, 64)]


def tensors(rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*s, device=DEVICE).to(dtype) for s in ((rows, size), (rows, size), (size,)))
    return x, residual, weight


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_the_reference(dtype: torch.dtype) -> None:
    given = (dict(zip(("x", "residual", "weight"), tensors(*shape, dtype))) for shape in SHAPES)
    for case in itertools.chain(cases_of(OP, dtype, DEVICE), (Case({**one, "eps": 1e-6}) for one in given)):
        check(OP, "cuda_cpp", case, dtype)


def test_rounds_where_the_reference_does() -> None:
    x, residual, weight = tensors(257, 4096, torch.bfloat16)
    wanted, total = OP.reference(x, residual, weight, 1e-6)
    got, found = OP.providers["cuda_cpp"].fn(x, residual.clone(), weight, 1e-6)
    assert torch.equal(found, total)
    assert (got != wanted).float().mean() < 1e-3


def test_a_row_is_the_same_in_every_batch_and_in_tensors_that_are_not_aligned() -> None:
    x, residual, weight = tensors(33, 4096, torch.bfloat16)
    fn = OP.providers["cuda_cpp"].fn
    wanted, _ = fn(x, residual.clone(), weight, 1e-6)
    assert torch.equal(fn(x[7:8], residual[7:8].clone(), weight, 1e-6)[0], wanted[7:8])
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view_as(x).copy_(x)
    assert shifted.data_ptr() % 16
    torch.testing.assert_close(fn(shifted, residual.clone(), weight, 1e-6)[0], wanted, **TOLERANCE[x.dtype])


def test_a_cuda_graph_records_it() -> None:
    x, residual, weight = tensors(8, 4096, torch.bfloat16)
    bound = RESOLVER.bind("fused_add_rms_norm", torch.bfloat16)
    assert bound.provider == "cuda_cpp"
    start = residual.clone()
    bound(x, residual, weight, 1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Twice: the second starts while the first runs, and adds to what that one wrote.
        first, _ = bound(x, residual, weight, 1e-6)
        second, _ = bound(first, residual, weight, 1e-6)
    residual.copy_(start)
    graph.replay()
    wanted, total = OP.reference(x, start, weight, 1e-6)
    wanted, total = OP.reference(first, total, weight, 1e-6)
    torch.testing.assert_close(second, wanted, **TOLERANCE[torch.bfloat16])
    assert torch.equal(residual, total)


def test_wrong_tensors_are_refused() -> None:
    fn = OP.providers["cuda_cpp"].fn
    x, residual, weight = tensors(8, 64, torch.bfloat16)
    for given, said in (
        ((x, residual, weight[:32]), r"expected residual and out in the shape of x \[..., size\], and weight \[size\]"),
        ((x, residual[:4], weight), r"expected residual and out in the shape of x"),
        ((x, residual.float(), weight), "expected contiguous tensors of one dtype on one device"),
        ((x.double(), residual.double(), weight.double()), "another dtype than float32, float16 and bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=said):
            fn(*given, 1e-6)
