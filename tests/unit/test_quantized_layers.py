"""Quantized matrices cut over ranks and merged of parts: every rank has exactly the weights that are its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packers import script
from torch import Tensor

from rapid_infer.errors import ConfigError, WeightError
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from rapid_infer.layers.moe import Experts
from rapid_infer.layers.parameter import Part, placement_of
from rapid_infer.ops import OPS, OpResolver, load_providers
from rapid_infer.parallel.state import ParallelState
from rapid_infer.quant import PlainScheme
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.formats.fp4 import Mxfp4Format, Nvfp4Format
from rapid_infer.quant.formats.fp8 import ROWS, TENSOR, Fp8Format, blocks
from rapid_infer.quant.formats.int4 import AwqFormat, GptqFormat, PackedFormat
from rapid_infer.quant.quantized import QuantizedExperts, QuantizedLinear
from rapid_infer.testing.simulated_ranks import run_ranks

load_providers()
CPU = OpResolver("cpu")
TOKENS = 5

# Each format as a part's packer makes it.
FORMATS: dict[str, tuple[Format, Callable[..., Any]]] = {
    "fp8": (Fp8Format(TENSOR), script.fp8(None, None, scale="weight_scale")),
    "fp8 rows": (Fp8Format(ROWS), script.fp8(1, None, scale="weight_scale")),
    "fp8 128": (Fp8Format(blocks(128, 128), dynamic="group"), script.fp8(128, 128, scale="weight_scale")),
    "fp8 32": (
        Fp8Format(blocks(32, 32), exponents=True),
        script.fp8(32, 32, scale="weight_scale", style="uint8"),
    ),
    "gptq": (GptqFormat(128), script.gptq(128, True, 1)),
    "gptq v2 zeros": (GptqFormat(64, symmetric=False, offset=0), script.gptq(64, False, 2)),
    "gptq act-order": (GptqFormat(128, ordered=True), script.gptq(128, True, 1, act_order=True)),
    "gptq act-order zeros": (
        GptqFormat(64, symmetric=False, ordered=True),
        script.gptq(64, False, 1, act_order=True),
    ),
    "gptq whole": (GptqFormat(None), script.gptq(-1, True, 1)),
    "awq": (AwqFormat(128, symmetric=False), script.awq(128)),
    "packed": (PackedFormat(128), script.packed(128, True)),
    "packed zeros": (PackedFormat(32, symmetric=False), script.packed(32, False)),
    "packed act-order": (PackedFormat(128, ordered=True), script.packed(128, True, act_order=True)),
    "nvfp4": (Nvfp4Format(), script.nvfp4(False)),
    "nvfp4 divided": (Nvfp4Format("weight_packed", "weight_global_scale", divides=True), script.nvfp4(True)),
    "mxfp4": (Mxfp4Format(), script.mxfp4("weight_packed", "weight_scale")),
}


class OneFormat(PlainScheme):
    def __init__(self, format: Format) -> None:
        self.format = format

    def method(self, module: str) -> QuantizedLinear:
        return QuantizedLinear(self.format)

    def experts(self, module: str) -> QuantizedExperts:
        return QuantizedExperts(self.format)


def context(name: str, parallel: ParallelState | None = None) -> BuildContext:
    quant = OneFormat(FORMATS[name][0])
    return BuildContext(torch.float32, CPU, 64, parallel or ParallelState(), quant, "layer")


def fill(layer: Any, part: Part, leaves: dict[str, Tensor], expert: int | None = None) -> None:
    for leaf, value in leaves.items():
        if leaf in layer.specs:
            place = placement_of(layer, leaf, part, expert)
            assert place is not None
            region = place.param.data[place.target]
            region.copy_(value.reshape(place.shape)[place.source].reshape(region.shape))


def packed_parts(name: str, parts: Sequence[Part], shapes: Sequence[tuple[int, int]]) -> dict[Part, Any]:
    generator = torch.Generator().manual_seed(3)
    made = {}
    for i, (part, shape) in enumerate(zip(parts, shapes)):
        # Unlike magnitudes: a scale that is another part's shows.
        made[part] = FORMATS[name][1](torch.randn(shape, generator=generator) * 3**i / shape[1] ** 0.5, f"part {part}")
    return made


def inputs(width: int) -> Tensor:
    return torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(5))


def close(got: Tensor, expected: Tensor) -> None:
    assert (got - expected).abs().max() <= 2e-6 * expected.abs().max() + 1e-6


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_parts_of_unlike_sizes(name: str, tp: int) -> None:
    """q, k and v of 576, 192 and 192 outputs; of three ranks the second begins within blocks of 128 and of 64."""
    made = packed_parts(name, "qkv", [(576, 384), (192, 384), (192, 384)])

    def run(parallel: ParallelState) -> None:
        layer = QKVParallelLinear(context(name, parallel), 384, 9, 3, 64)
        for part, (leaves, _) in made.items():
            fill(layer, part, leaves)
        layer.finalize_weights()
        expected = [F.linear(inputs(384), dense).chunk(tp, 1)[parallel.tp_rank] for _, dense in made.values()]
        close(layer(inputs(384)), torch.cat(expected, 1))

    run_ranks(tp, run)


@pytest.mark.parametrize("size", [384, 640])
@pytest.mark.parametrize("name", FORMATS)
def test_shares_of_192_and_320(name: str, size: int) -> None:
    """Of outputs and of inputs: one and a half blocks of 128, two and a half."""
    up, down = packed_parts(name, (0, 1), [(size, 128)] * 2), packed_parts(name, (None,), [(48, size)])

    def run(parallel: ParallelState) -> None:
        first = MergedColumnParallelLinear(context(name, parallel), 128, [size, size])
        for part, (leaves, _) in up.items():
            fill(first, part, leaves)
        second = RowParallelLinear(context(name, parallel), size, 48)
        fill(second, None, down[None][0])
        for layer in (first, second):
            layer.finalize_weights()
        halves = [F.linear(inputs(128), dense).chunk(2, 1)[parallel.tp_rank] for _, dense in up.values()]
        close(first(inputs(128)), torch.cat(halves, 1))
        close(second(inputs(size).chunk(2, 1)[parallel.tp_rank].contiguous()), F.linear(inputs(size), down[None][1]))

    run_ranks(2, run)


@pytest.mark.parametrize(("name", "tp", "ep"), [(n, 2, 1) for n in FORMATS if "order" not in n] + [("gptq", 2, 2)])
def test_experts(name: str, tp: int, ep: int) -> None:
    experts, hidden, size = 4, 128, 384
    made = [
        (packed_parts(name, (0, 1), [(size, hidden)] * 2), packed_parts(name, (None,), [(hidden, size)]))
        for _ in range(experts)
    ]
    weights = torch.rand(TOKENS, 2)
    chosen = torch.randint(experts, (TOKENS, 2), dtype=torch.int32)
    gate_up = torch.stack([torch.cat([dense for _, dense in up.values()]) for up, _ in made])
    down = torch.stack([one[None][1] for _, one in made])
    expected = OPS["fused_experts"].reference(inputs(hidden), gate_up, down, weights, chosen, None)

    def run(parallel: ParallelState) -> Tensor:
        expert_map = parallel.expert_map(experts)
        layer = Experts(context(name, parallel), hidden, size, expert_map)
        for expert, (up, one) in enumerate(made):
            if expert_map[expert] >= 0:
                for part, (leaves, _) in up.items():
                    fill(layer.gate_up_proj, part, leaves, expert)
                fill(layer.down_proj, None, one[None][0], expert)
        layer.finalize_weights()
        return layer(inputs(hidden), weights, torch.tensor(expert_map, dtype=torch.int32)[chosen], None)

    close(sum(run_ranks(tp, run, ep_size=ep)), expected)


def test_a_share_that_no_group_fits() -> None:
    with pytest.raises(
        ConfigError, match=r"layer: groups of 128 inputs do not fit this rank's inputs 120 to 160 of 160.*\[1, 2, 5"
    ):
        RowParallelLinear(context("packed", ParallelState(3, 4)), 160, 48)


def test_orders_that_parts_do_not_share() -> None:
    layer = MergedColumnParallelLinear(context("gptq act-order"), 256, [64, 64])
    for part, (leaves, _) in packed_parts("gptq act-order", (0, 1), [(64, 256)] * 2).items():
        fill(layer, part, leaves | {"g_idx": leaves["g_idx"].roll(int(part or 0))})
    with pytest.raises(WeightError, match="g_idx differs between its parts"):
        layer.finalize_weights()


def test_a_group_that_does_not_exist() -> None:
    layer = RowParallelLinear(context("gptq act-order"), 256, 64)
    leaves, _ = packed_parts("gptq act-order", (None,), [(64, 256)])[None]
    fill(layer, None, leaves | {"g_idx": leaves["g_idx"] + 1})
    with pytest.raises(WeightError, match="g_idx has groups 1 to 2; expected 0 to 1"):
        layer.finalize_weights()


@pytest.mark.parametrize("name", ["fp8 128", "gptq", "nvfp4"])
def test_a_scale_of_zero_is_for_zeros_alone(name: str) -> None:
    for codes_too in (True, False):
        layer = RowParallelLinear(context(name), 256, 64)
        leaves, _ = packed_parts(name, (None,), [(64, 256)])[None]
        leaf = "scales" if name == "gptq" else "weight_scale"
        leaves[leaf].fill_(0)
        if codes_too:
            words = leaves["qweight" if name == "gptq" else "weight"]
            words.copy_(torch.full_like(words, -0x77777778) if name == "gptq" else torch.zeros_like(words))
        fill(layer, None, leaves)
        if codes_too:
            layer.finalize_weights()
            assert not layer(inputs(256)).any()
        else:
            with pytest.raises(
                WeightError, match=r"layer: the scale of weight \[0, \d+\] is zero, and its code is not"
            ):
                layer.finalize_weights()
