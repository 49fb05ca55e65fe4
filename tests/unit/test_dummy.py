"""Dummy weights: random, reproducible by name, never constant."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from rapid_infer.loader.dummy import load_dummy
from rapid_infer.loader.load import finalize


def holder(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    return module


def model(*names: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    root = nn.Module()
    for name in names:
        root.add_module(name, holder(64, 48, dtype=dtype))
    return root


def filled(root: nn.Module, **options) -> nn.Module:
    load_dummy(root, **options)
    return root


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_values_are_normal_and_differ_between_parameters(dtype: torch.dtype) -> None:
    root = filled(model("up", "down", dtype=dtype))
    for name in ("up", "down"):
        values = root.get_submodule(name).weight.float()
        assert abs(values.mean()) < 0.002
        assert 0.017 < values.std() < 0.023
    assert not torch.equal(root.up.weight.float(), root.down.weight.float())


def test_the_scale_is_taken() -> None:
    root = model("up")
    load_dummy(root, scale=1.5)
    assert 1.4 < root.up.weight.std() < 1.6


def test_values_depend_on_the_name_alone() -> None:
    first, second = filled(model("a", "b", "c")), filled(model("c", "a"))
    assert torch.equal(first.a.weight, second.a.weight)
    assert torch.equal(first.c.weight, second.c.weight)
    again = filled(first)
    assert torch.equal(again.a.weight, second.a.weight)


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    load_dummy(model("a"))
    assert torch.equal(torch.rand(4), want)


def test_another_process_makes_the_same_values() -> None:
    code = (
        "import torch\nfrom torch import nn\nfrom rapid_infer.loader.dummy import load_dummy\n"
        "m = nn.ModuleDict({'a': nn.Linear(16, 16, bias=False)})\nload_dummy(m)\n"
        "print(m['a'].weight.double().sum().item())"
    )
    sums = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
        for _ in range(2)
    }
    assert len(sums) == 1


def test_norms_are_one_and_other_vectors_are_not() -> None:
    root = nn.Module()
    for name in ("input_layernorm", "q_norm", "norm", "conv"):
        root.add_module(name, holder(32))
    root.norm.bias = nn.Parameter(torch.zeros(32))
    root.norm_mlp = holder(4, 4)
    load_dummy(root)
    for name in ("input_layernorm", "q_norm", "norm"):
        assert torch.equal(root.get_submodule(name).weight, torch.ones(32))
    for values in (root.conv.weight, root.norm.bias, root.norm_mlp.weight):
        assert values.unique().numel() == values.numel()


def test_shared_parameters_count_once_under_their_first_name() -> None:
    root = model("embed", "head")
    root.head.weight = root.embed.weight
    load_dummy(root)
    assert root.head.weight is root.embed.weight
    assert torch.equal(root.embed.weight, filled(model("embed")).embed.weight)


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
def test_integers_are_spread_over_their_type(dtype: torch.dtype) -> None:
    values = filled(model("q", dtype=dtype)).q.weight
    if dtype == torch.bool:
        assert 0.4 < values.float().mean() < 0.6
        return
    info = torch.iinfo(dtype)
    spread = values.double() / (info.max - info.min)
    assert spread.max() - spread.min() > 0.9


def test_scales_and_packed_values() -> None:
    scales = filled(model("s", dtype=torch.float8_e8m0fnu)).s.weight.float()
    assert 0 < scales.min() < scales.max() < 1
    root = nn.Module()
    root.w = nn.Parameter(torch.zeros(64, 48, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), requires_grad=False)
    load_dummy(root)
    assert root.w.data.view(torch.uint8).unique().numel() > 200


def test_parameters_keep_their_storage_and_views_with_gaps_work() -> None:
    root = nn.Module()
    root.weight = nn.Parameter(torch.zeros(6, 8).T, requires_grad=False)
    address = root.weight.data_ptr()
    load_dummy(root)
    assert root.weight.data_ptr() == address
    assert root.weight.unique().numel() == 48


def test_large_parameters_are_filled_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rapid_infer.loader.dummy.CHUNK", 1000)
    root = filled(model("a", dtype=torch.float8_e4m3fn))
    flat = root.a.weight.float().flatten()
    assert all(chunk.std() > 0.01 for chunk in flat.split(256))
    assert not torch.equal(flat[:1000], flat[1000:2000])


def test_finalize_is_left_to_the_caller() -> None:
    root = model("a")
    calls: list[float] = []
    root.a.finalize_weights = lambda: calls.append(root.a.weight.abs().sum().item())
    load_dummy(root)
    assert calls == []
    finalize(root)
    assert len(calls) == 1
    assert calls[0] > 0


def test_a_meta_model_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"a\.weight is still on the meta device"):
        load_dummy(model("a").to("meta"))
