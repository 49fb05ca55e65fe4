"""What quantized matrices mean: packing, errors of the quantizers, scales, and what is not finite."""

import pytest
import torch
from torch import Tensor

from rapid_infer.ops import OPS, QuantizedMatrix, load_providers, pack_int4, unpack_int4
from rapid_infer.ops.quantized import E2M1, scale_values
from rapid_infer.ops.quantizers import e2m1_codes, quantize_fp8, quantize_int4, quantize_mxfp4, quantize_nvfp4
from rapid_infer.ops.reference.quantized_linear import quantize_activations

load_providers()

N, K = 256, 2048
# In percent, of Gaussian weights, by independent code; a tenth more is allowed.
ERRORS = {
    "fp8 tensor": (lambda w: quantize_fp8(w, N, K), 2.65),
    "fp8 row": (lambda w: quantize_fp8(w, 1, K), 2.65),
    "fp8 block": (lambda w: quantize_fp8(w, 128, 128), 2.65),
    "nvfp4": (quantize_nvfp4, 8.7),
    "mxfp4": (quantize_mxfp4, 11.1),
    "int4 g128": (lambda w: quantize_int4(w, 128), 11.1),
    "int4 g128 zeros": (lambda w: quantize_int4(w, 128, symmetric=False), 10.1),
    "int4 g32 zeros": (lambda w: quantize_int4(w, 32, symmetric=False), 8.1),
}


@pytest.fixture(scope="module")
def weight() -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * 0.02


def dense(matrix: QuantizedMatrix) -> Tensor:
    return OPS["dequantize"].reference(matrix, torch.float32)


def linear(x: Tensor, matrix: QuantizedMatrix, activation: str = "none", scale: Tensor | None = None) -> Tensor:
    return OPS["quantized_linear"].reference(x, matrix, activation, scale, 0, None, False)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_the_quantizers(name: str, weight: Tensor) -> None:
    quantize, percent = ERRORS[name]
    error = 100 * (dense(quantize(weight)) - weight).norm() / weight.norm()
    assert 0.8 * percent < error < 1.1 * percent


@pytest.mark.parametrize("name", ERRORS)
def test_rows_of_zeros_stay_zeros(name: str) -> None:
    weight = torch.randn(N, K)
    weight[5] = 0
    assert not dense(ERRORS[name][0](weight))[5].any()


def test_packing() -> None:
    codes = torch.randint(16, (3, 5, 208), dtype=torch.uint8)
    packed = pack_int4(codes)
    assert packed.shape == (3, 5, 128)
    assert (packed[0, 0, 21] & 15, packed[0, 0, 21] >> 4) == (codes[0, 0, 38], codes[0, 0, 54])
    assert torch.equal(unpack_int4(packed, 208), codes)


def test_codes_of_four_bits() -> None:
    assert torch.equal(e2m1_codes(torch.tensor(E2M1)), torch.arange(8, dtype=torch.uint8))
    values = torch.tensor([0.25, 0.26, 0.75, 1.25, -1.75, 2.5, 3.5, -5.0, 100.0])
    assert e2m1_codes(values).tolist() == [0, 1, 2, 2, 12, 4, 6, 14, 7]


def test_scales_of_bytes_are_powers_of_two() -> None:
    scale = torch.tensor([0, 1, 126, 127, 130, 254], dtype=torch.uint8)
    want = torch.tensor([2.0**-127, 2.0**-126, 0.5, 1.0, 8.0, 2.0**127])
    assert torch.equal(scale_values(scale), want)
    assert torch.equal(scale_values(scale.view(torch.float8_e8m0fnu)), want)


def test_scales_and_zeros_by_hand() -> None:
    codes = torch.arange(32, dtype=torch.uint8).view(1, 32) % 16
    zero, scale = torch.tensor([[16, 3]], dtype=torch.uint8), torch.tensor([[0.5, 2.0]], dtype=torch.float16)
    int4 = QuantizedMatrix("int4", pack_int4(codes), scale, (1, 32), (1, 16), zero)
    want = torch.cat(((torch.arange(16.0) - 16) / 2, (torch.arange(16.0) - 3) * 2))
    assert torch.equal(dense(int4)[0], want)
    scale = torch.tensor([[0.5, 2.0]]).to(torch.float8_e4m3fn)
    fp4 = QuantizedMatrix("fp4", pack_int4(codes), scale, (1, 32), (1, 16), row_scale=torch.tensor([3.0]))
    table = torch.tensor([*E2M1, *(-v for v in E2M1)])
    assert torch.equal(dense(fp4)[0], torch.cat((table * 1.5, table * 6)))
    values = torch.ones(5, 5).to(torch.float8_e4m3fn)
    fp8 = QuantizedMatrix("fp8", values, torch.arange(6.0).view(2, 3), (5, 5), (4, 2))
    assert dense(fp8).tolist() == [[0, 0, 1, 1, 2]] * 4 + [[3, 3, 4, 4, 5]]


def test_a_quantized_row_depends_on_itself_alone() -> None:
    x = torch.randn(4, 200)
    x[2] = 0
    for group in (200, 128, 64):
        codes, scale = quantize_activations(x, group, None)
        assert scale.shape == (4, -(-200 // group))
        assert (scale[2] == 1).all()
        torch.testing.assert_close(codes.float().abs().amax(1)[[0, 1, 3]], torch.full((3,), 448.0))
        alone, mine = quantize_activations(x[1:2], group, None)
        assert torch.equal(alone.view(torch.uint8), codes[1:2].view(torch.uint8))
        assert torch.equal(mine, scale[1:2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("activation", ["none", "tensor", "token", "group"])
def test_what_is_not_finite_fails_its_row_only(activation: str, bad: float, weight: Tensor) -> None:
    x = torch.randn(3, K)
    x[1, 7] = bad
    y = linear(x, quantize_fp8(weight, 128, 128), activation, torch.tensor(0.01))
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


def test_a_static_scale_saturates() -> None:
    x = torch.tensor([[1000.0, -1000.0, 1.0, 0.0]])
    codes, _ = quantize_activations(x, 4, torch.tensor(0.5))
    assert codes.float().tolist() == [[448.0, -448.0, 2.0, 0.0]]


def test_few_rows_are_not_rounded(weight: Tensor) -> None:
    x, matrix, op = torch.randn(3, K), quantize_fp8(weight, 1, K), OPS["quantized_linear"].reference
    exact = linear(x, matrix)
    assert torch.equal(op(x, matrix, "token", None, 3, None, False), exact)
    rounded = op(x, matrix, "token", None, 2, None, False)
    assert 0.01 < (rounded - exact).norm() / exact.norm() < 0.04
