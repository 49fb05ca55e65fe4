"""The Triton products of few tokens, in Triton's interpreter where there is no GPU: every way to cut them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.embedding import LMHead
from rapid_infer.layers.mlp import GatedMLP
from rapid_infer.ops import OpResolver
from rapid_infer.ops.providers.triton.linear import linear as provider
from rapid_infer.ops.providers.triton.linear.choice import choose
from rapid_infer.ops.providers.triton.linear.config import Config, padded_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
DOT = Config(16, 32, stages=3)
GEMV = Config(4, 32, gemv=True)


def tensors(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(m + n + k)
    x, weight = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE) / k**0.5
    return x.to(dtype), weight.to(dtype)


def check(got: Tensor, x: Tensor, weight: Tensor, gated: bool = False) -> None:
    want = F.linear(x.float(), weight.float())
    if gated:
        gate, up = want.chunk(2, dim=1)
        want = F.silu(gate) * up
    tolerance = TOLERANCE[x.dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
    assert not provider.workspace(x.device)[1].any()


@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize(
    ("m", "dtype"),
    [(1, torch.bfloat16), (3, torch.float32), (16, torch.float16), (17, torch.bfloat16), (40, torch.float32)],
)
def test_tensor_cores(m: int, weight_first: bool, splits: int, dtype: torch.dtype) -> None:
    x, weight = tensors(m, 37, 176, dtype)
    config = Config(16, 32, splits, stages=3, weight_first=weight_first)
    got = provider.product(x, weight, config)
    assert got.dtype is dtype
    check(got, x, weight)


@DTYPES
@pytest.mark.parametrize("splits", [1, 2, 3, 4])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("block_k", [32, 256])
def test_plain_arithmetic(block_k: int, ahead: int, splits: int, dtype: torch.dtype) -> None:
    x, weight = tensors(1, 37, 176, dtype)
    check(provider.product(x, weight, Config(4, block_k, splits, gemv=True, ahead=ahead)), x, weight)


@pytest.mark.parametrize("config", [DOT, Config(16, 32, 2, tma=True), Config(16, 64, tma=True, weight_first=True)])
@pytest.mark.parametrize("gated", [False, True])
def test_weight_tiles_by_descriptor(config: Config, gated: bool) -> None:
    x, weight = tensors(5, 72, 208, torch.bfloat16)
    check(provider.product(x, weight, config, gated=gated), x, weight, gated)


@pytest.mark.parametrize("config", [DOT, GEMV])
def test_whole_tiles_need_no_masks(config: Config) -> None:
    x, weight = tensors(1, 32, 128, torch.bfloat16)
    check(provider.product(x, weight, config), x, weight)


@DTYPES
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("m", "config"), [(1, GEMV), (1, DOT), (19, DOT)])
def test_gated(m: int, config: Config, splits: int, dtype: torch.dtype) -> None:
    x, weight = tensors(m, 2 * 21, 112, dtype)
    check(provider.product(x, weight, Config(**{**vars(config), "splits": splits}), gated=True), x, weight, True)


@pytest.mark.parametrize("config", [DOT, Config(16, 32, 2), GEMV])
def test_rows_of_x_and_of_the_weight_may_be_part_of_larger_tensors(config: Config) -> None:
    x, weight = tensors(1 if config.gemv else 3, 50, 64, torch.float16)
    wide = F.pad(x, (0, 16), value=torch.nan)[:, :64]
    long = F.pad(weight, (0, 0, 1, 2), value=torch.nan)[1:-2]
    check(provider.product(wide, long, config), x, weight)
    assert provider.chosen(wide, long) is not None


def test_results_are_the_same_every_time_and_the_workspace_serves_any_shape() -> None:
    x, weight = tensors(17, 40, 160, torch.bfloat16)
    config = Config(16, 32, 3)
    first = provider.product(x, weight, config)
    other_x, other_weight = tensors(3, 100, 96, torch.bfloat16)
    check(provider.product(other_x, other_weight, Config(16, 32, 2)), other_x, other_weight)
    assert torch.equal(provider.product(x, weight, config), first)


def test_logits_are_not_rounded() -> None:
    x, weight = tensors(3, 33, 64, torch.bfloat16)
    got = provider.product(x, weight, DOT, torch.float32)
    torch.testing.assert_close(got, F.linear(x.float(), weight.float()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [DOT, Config(16, 32, weight_first=True), GEMV])
def test_of_equal_scores_the_lowest_index_is_best(config: Config) -> None:
    x, weight = tensors(1 if config.gemv else 5, 75, 64)
    weight[[9, 40, 41, 74]] = x[0] / x[0].norm()
    x[:] = x[0]
    value, index = provider.product_argmax(x, weight, config)
    assert index.tolist() == [9] * len(x)
    assert index.dtype is torch.int64
    torch.testing.assert_close(value, x.norm(dim=1))


@pytest.mark.parametrize("config", [DOT, GEMV])
def test_scores_that_are_all_negative(config: Config) -> None:
    x, weight = torch.ones(1, 32, device=DEVICE), torch.full((21, 32), -1.0, device=DEVICE)
    weight[20] = -0.5
    value, index = provider.product_argmax(x, weight, config)
    assert (value.item(), index.item()) == (-16.0, 20)


@pytest.mark.parametrize("config", [DOT, GEMV])
def test_nan_shows_in_the_best_value_of_its_row_only(config: Config) -> None:
    x, weight = tensors(1 if config.gemv else 3, 75, 64)
    x[0, 5] = torch.nan
    value, index = provider.product_argmax(x, weight, config)
    assert value.isfinite().tolist() == [False, True, True][: len(x)]
    assert ((index >= 0) & (index < 75)).all()


def test_the_best_of_given_scores() -> None:
    scores = torch.randn(3, 9000, device=DEVICE)
    scores[0, [77, 5000, 8999]] = 9.0
    scores[1, 8999] = 9.0
    scores[2, 4097] = torch.nan
    value, index = provider.argmax(scores)
    assert index[:2].tolist() == [77, 8999]
    assert value[:2].tolist() == [9.0, 9.0]
    assert not value[2].isfinite()


@pytest.mark.parametrize("m", [0, 1, 3, 65])
def test_the_providers_take_any_number_of_tokens(m: int) -> None:
    x, weight = tensors(m, 70, 48, torch.bfloat16)
    check(provider.linear(x, weight), x, weight)
    check(provider.lm_head(x, weight), x, weight)
    check(provider.linear_silu_and_mul(x, weight), x, weight, True)
    value, index = provider.lm_head_argmax(x, weight)
    assert index.shape == (m,)
    if m:
        torch.testing.assert_close(value, F.linear(x.float(), weight.float()).amax(dim=1), atol=4e-2, rtol=2e-2)


def test_shapes_without_a_kernel_go_to_cublas() -> None:
    for m, n, k in ((3, 20, 40), (3, 20, 41), (1, 20, 7)):
        x, weight = tensors(m, n, k, torch.bfloat16)
        assert provider.chosen(x, weight) is None
        check(provider.linear(x, weight), x, weight)
    assert provider.chosen(*(t.t() for t in tensors(64, 64, 64))) is None


def test_what_is_chosen_can_run() -> None:
    for n, k in (
        (6144, 4096),
        (4096, 12288),
        (151936, 4096),
        (1024, 2048),
        (1024, 3072),
        (48, 64),
        (33, 16),
        (256, 65536),
    ):
        for m in (1, 2, 16, 17, 33, 64):
            for gated in (False, True):
                config = choose(n, k, m, torch.bfloat16, 132, gated)
                if config is None:
                    assert m > 16
                    continue
                assert config.fits(m, n, gated)
                assert not config.gemv or m == 1
                tile = (config.block_n * (1 + gated) + padded_rows(m)) * config.block_k * 2
                assert config.gemv or tile * config.stages <= 227 * 1024
    assert choose(64, 64, 65, torch.bfloat16, 132) is None
    assert choose(64, 64, 4, torch.float32, 132) is None


def test_a_configuration_that_cannot_compute_is_refused() -> None:
    x, weight = tensors(3, 32, 64)
    with pytest.raises(ValueError, match="cannot compute 3 x 32 outputs"):
        provider.product(x, weight, GEMV)
    with pytest.raises(ValueError, match="cannot compute"):
        provider.product_argmax(x, weight, Config(16, 32, 2))


OPS = ("linear", "linear_silu_and_mul", "lm_head", "lm_head_argmax", "silu_and_mul")


def built(dtype: torch.dtype) -> tuple[BuildContext, BuildContext]:
    """One context that binds the kernels, one that binds the references."""
    kernels, torch_only = (OpResolver(DEVICE, {op: [name] for op in OPS}) for name in ("triton", "torch"))
    return BuildContext(dtype, kernels, 64), BuildContext(dtype, torch_only, 64)


def test_a_gated_layer_fuses_plain_products_without_bias() -> None:
    ours, theirs = built(torch.float32)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        fused, plain, biased = GatedMLP(ours, 32, 48), GatedMLP(theirs, 32, 48), GatedMLP(ours, 32, 48, bias=True)
        for param in fused.parameters():
            param.data.normal_(std=0.2)
        plain.load_state_dict(fused.state_dict())
        x = torch.randn(1, 32)
    torch.testing.assert_close(fused(x), plain(x), atol=1e-5, rtol=1e-5)
    assert ours.ops.counts()["linear_silu_and_mul=triton"] == 1
    assert biased._fused is None
    assert plain._fused is None


def test_the_head_scales_and_caps_the_best_score() -> None:
    ours, _ = built(torch.float32)
    torch.manual_seed(0)
    x = torch.randn(3, 32, device=DEVICE)
    weight = torch.randn(50, 32, device=DEVICE)
    for scale, cap in ((1.0, None), (0.5, 3.0), (-1.0, 3.0)):
        head = LMHead(ours, 50, 32, scale=scale, soft_cap=cap)
        head.weight.data = weight
        head.finalize_weights()
        logits = head.logits(x)
        value, index = head.argmax(x)
        assert index.tolist() == logits.argmax(dim=1).tolist()
        torch.testing.assert_close(value, logits.amax(dim=1))
        broken = x.clone()
        broken[1, 0] = torch.nan
        assert head.argmax(broken)[0].isfinite().tolist() == [True, False, True]
