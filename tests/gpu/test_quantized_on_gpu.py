"""Products with quantized matrices: every form, number of tokens and edge of tiles, and what is not finite."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from rapid_infer.ops import OPS, QuantizedMatrix
from rapid_infer.testing.op_cases.quantized import matrices

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
FORMS = (
    "fp8 tensor", "fp8 row", "fp8 128", "fp8 32", "fp8 64", "int4 128", "int4 64 zeros", "int4 32 zeros fp16",
    "int4 row", "mxfp4", "nvfp4",
)  # fmt: skip
FEW = (*range(1, 71), 96, 127, 128, 129, 200, 300, 511, 512, 513)
SHAPES = ((200, 1040), (64, 128), (129, 272), (1000, 4096), (16, 2064))


def all_forms(n: int, k: int) -> list[QuantizedMatrix]:
    torch.manual_seed(n + k)
    weight = torch.randn(n, k, device="cuda") * (0.2 + torch.rand(n, 1, device="cuda")) / k**0.5
    return list(matrices(weight))


def product(x: Tensor, matrix: QuantizedMatrix, activation: str = "none", exact_rows: int = 1 << 20) -> Tensor:
    from rapid_infer.ops.providers.triton.quantized.linear import quantized_linear

    return quantized_linear(x, matrix, activation, None, exact_rows, None)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", range(len(FORMS)), ids=FORMS)
def test_every_number_of_tokens(form: int, shape: tuple[int, int]) -> None:
    matrix = all_forms(*shape)[form]
    dense = OPS["dequantize"].reference(matrix, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(max(FEW), shape[1], device="cuda").to(dtype)
        want = F.linear(x.float(), dense)
        for m in FEW if dtype is torch.bfloat16 else FEW[::9]:
            got = product(x[:m], matrix)
            assert error(got, want[:m]) < 4e-3, (m, dtype)


@pytest.mark.parametrize("form", range(len(FORMS)), ids=FORMS)
def test_dequantize(form: int) -> None:
    from rapid_infer.ops.providers.triton.quantized.dequantize import dequantize

    for n, k in (*SHAPES, (37, 208)):
        matrix = all_forms(n, k)[form]
        want = OPS["dequantize"].reference(matrix, torch.float32)
        torch.testing.assert_close(dequantize(matrix, torch.float32), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", range(len(FORMS)), ids=FORMS)
def test_what_is_not_finite_fails_its_row_only(form: int, bad: float) -> None:
    matrix = all_forms(200, 1040)[form]
    for m in (2, 17, 40, 70, 200):
        x = torch.randn(m, 1040, device="cuda", dtype=torch.bfloat16)
        clean = product(x, matrix)
        x[m - 2, 700] = bad
        for activation in ("none", "token") if matrix.form == "fp8" else ("none",):
            got = product(x, matrix, activation, 64)
            rest = [i for i in range(m) if i != m - 2]
            assert not got[m - 2].isfinite().any()
            assert got[rest].isfinite().all()
            if activation == "none" or m <= 64:
                assert torch.equal(got[rest], clean[rest])


def test_rows_do_not_depend_on_their_neighbours() -> None:
    for matrix in all_forms(1000, 4096):
        x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(product(x, matrix)[3:7], product(x.roll(5, 0), matrix)[8:12])
