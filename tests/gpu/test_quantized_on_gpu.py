"""Products with quantized matrices: every form, number of tokens and edge of tiles, and what is not finite."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_traffic import params, prompts, tokens
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


def product(
    x: Tensor, matrix: QuantizedMatrix, activation: str = "none", exact_rows: int = 1 << 20, gated: bool = False
) -> Tensor:
    from rapid_infer.ops.providers.triton.quantized.linear import quantized_linear

    return quantized_linear(x, matrix, activation, None, exact_rows, None, gated)


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
def test_both_halves_of_a_gated_layer(form: int) -> None:
    for n, k in ((200, 1040), (1024, 4096)):
        matrix = all_forms(n, k)[form]
        dense = OPS["dequantize"].reference(matrix, torch.float32)
        x = torch.randn(200, k, device="cuda", dtype=torch.bfloat16)
        gate, up = F.linear(x.float(), dense).chunk(2, 1)
        for m in (1, 5, 17, 33, 64, 65, 200):
            assert error(product(x[:m], matrix, gated=True), (F.silu(gate) * up)[:m]) < 6e-3, m


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


@pytest.mark.parametrize("scheme", ["fp8", "fp8_row", "fp8_block", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
def test_graphs_give_what_eager_steps_give(model: str, scheme: str, tiny, open_llm) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    if model == "qwen3_moe":
        sizes |= {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128}
    made, work = tiny(model, sizes), prompts((1, 3, 17, 40, 70))
    options = {"dtype": "bfloat16", "quantization": scheme}
    got = []
    for eager in (False, True):
        llm = open_llm(made, enforce_eager=eager, **options)
        got.append(tokens(llm.generate(work, params("greedy", max_tokens=12))))
    assert got[0] == got[1]
