"""Where the pieces of merged, cut and quantized matrices lie: each local value keeps what the checkpoint gives it."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rapid_infer.errors import ConfigError, WeightError
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.layout import ExpertAxis, MatrixLayout, Shard, cut, whole
from rapid_infer.layers.linear import Linear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from rapid_infer.loader.load import load_weights
from rapid_infer.loader.rules import stack
from rapid_infer.loader.weight_map import WeightMap
from rapid_infer.ops.registry import OpResolver
from rapid_infer.parallel.state import ParallelState
from rapid_infer.quant import IN, OUT, PART, Dim, ParamSpec, PlainMethod

OPS = OpResolver("cpu")
FLOAT = torch.float32
ROWS, COLUMNS = Dim("output", 128), Dim("input", 128)
FORMATS: dict[str, dict[str, tuple[Dim, ...]]] = {
    "block": {"scale": (ROWS, COLUMNS)},
    "tensor": {"scale": (PART,), "input_scale": (PART,)},
    "row": {"scale": (OUT, Dim("input", None))},
    "gptq": {
        "qweight": (Dim("input", 8, packed=True), OUT),
        "scales": (COLUMNS, OUT),
        "qzeros": (COLUMNS, Dim("output", 8, packed=True)),
    },
    "any order": {"scales": (Dim("input", 128, whole=True), OUT), "g_idx": (PART, IN)},
}


class Method(PlainMethod):
    """A weight and what its format has beside it."""

    def __init__(self, leaves: Mapping[str, tuple[Dim, ...]]) -> None:
        self.leaves = leaves

    def params(self, dtype: torch.dtype) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(dtype), **{leaf: ParamSpec(FLOAT, dims) for leaf, dims in self.leaves.items()}}


class Scheme:
    name = "test"

    def __init__(self, leaves: Mapping[str, tuple[Dim, ...]]) -> None:
        self.leaves = leaves

    def method(self, module: str) -> Method:
        return Method(self.leaves)


def context(leaves: Mapping[str, tuple[Dim, ...]], rank: int = 0, ranks: int = 1) -> BuildContext:
    return BuildContext(FLOAT, OPS, 64, ParallelState(rank, ranks), Scheme(leaves), "layer")


CASES = {
    "q, k, v of 576, 192, 192": (1, lambda ctx: QKVParallelLinear(ctx, 200, 9, 3, 64)),
    "cut inside a block": (3, lambda ctx: QKVParallelLinear(ctx, 200, 9, 3, 64)),
    "more ranks than kv heads": (4, lambda ctx: QKVParallelLinear(ctx, 200, 8, 2, 64)),
    "one and a half blocks a rank": (4, lambda ctx: MergedColumnParallelLinear(ctx, 200, [768, 768])),
    "less than a block a rank": (4, lambda ctx: MergedColumnParallelLinear(ctx, 200, [320, 64])),
    "inputs cut inside a block": (2, lambda ctx: RowParallelLinear(ctx, 384, 100)),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_each_value_keeps_what_the_checkpoint_gives_it(case: str, form: str) -> None:
    """What each rank makes of its entries, against the checkpoint's, spread over all features and then cut."""
    ranks, build = CASES[case]
    for rank in range(ranks):
        layer = build(context(FORMATS[form], rank, ranks))
        layout = layer.layout
        for leaf, dims in FORMATS[form].items():
            param = layer.get_parameter(leaf).data.fill_(torch.nan)
            wanted: list[Tensor] = []
            for shard in layout.outs:
                place = layer.placement(leaf, shard.name)
                stored = torch.rand(place.shape)
                param[place.target] = stored[place.source]
                wanted.append(spread(stored, dims, shard, layout.ins))
            assert not param.isnan().any()
            for position, dim in enumerate(dims):
                param = param.index_select(position, layout.entries(dim))
            assert torch.equal(param, torch.cat(wanted, next(i for i, dim in enumerate(dims) if dim.over != "input")))


def spread(stored: Tensor, dims: tuple[Dim, ...], out: Shard, ins: Shard) -> Tensor:
    """One part's tensor, repeated for each feature, then cut as the features are."""
    for position, dim in enumerate(dims):
        mine = ins if dim.over == "input" else out
        if dim.over == "part":
            stored = torch.stack([stored] * mine.local, position)
        else:
            every = stored.repeat_interleave(dim.group or mine.size, position).narrow(position, 0, mine.size)
            stored = every.narrow(position, mine.start, mine.local)
    return stored


def test_each_rank_keeps_the_groups_it_needs() -> None:
    """Both ranks the group that is cut, and all groups where inputs are in any order."""
    for rank in (0, 1):
        block, mixed = (RowParallelLinear(context(FORMATS[form], rank, 2), 384, 100) for form in ("block", "any order"))
        assert (block.scale.shape, mixed.scales.shape, mixed.g_idx.shape) == ((1, 2), (3, 100), (1, 192))


def test_a_cut_through_packed_values_is_refused_with_the_sizes_that_work() -> None:
    columns = context({"qzeros": (COLUMNS, Dim("output", 8, packed=True))}, 1, 4)
    with pytest.raises(
        ConfigError, match=r"layer.qzeros stores 8 output features of part 1 in one value.*12 to 24 of"
    ) as e:
        MergedColumnParallelLinear(columns, 128, [64, 48])
    assert str(e.value).endswith("leaves a multiple of 8 to each rank, one of [1, 2, 3, 6]")
    rows = {"qweight": (Dim("input", 8, packed=True), OUT)}
    with pytest.raises(ConfigError, match=r"layer.qweight stores 8 input features in one value, .*0 to 6 of 12.*\[1\]"):
        RowParallelLinear(context(rows, 0, 2), 12, 4)
    # The end of a matrix is no cut: its last value may hold fewer.
    assert RowParallelLinear(context(rows), 12, 4).qweight.shape == (2, 4)
    assert Linear(context(rows), 12, 4).layout.entries(Dim("input", 8, packed=True)).tolist() == [0] * 8 + [1] * 4


class Model(nn.Module):
    def __init__(self, leaves: Mapping[str, tuple[Dim, ...]]) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(context(leaves), 200, 9, 3, 64)


def load(folder: Path, model: Model, leaf: str, tensors: Mapping[str, Tensor]) -> None:
    rows = {"q": 576, "k": 192, "v": 192}
    weights = {f"{part}_proj.weight": torch.zeros(size, 200) for part, size in rows.items()}
    scales = {f"{name}_proj.{leaf}": tensor for name, tensor in tensors.items()}
    save_file({**weights, **scales}, folder / "model.safetensors")
    load_weights(model, WeightMap([stack(("q_proj", "k_proj", "v_proj"), "qkv_proj", ("q", "k", "v"))]), folder)


def test_block_scales_of_parts_stand_one_after_another(tmp_path: Path) -> None:
    model = Model(FORMATS["block"])
    scales = {"q": torch.rand(5, 2), "k": torch.rand(2, 2), "v": torch.rand(2, 2)}
    load(tmp_path, model, "scale", scales)
    assert torch.equal(model.qkv_proj.scale, torch.cat(list(scales.values())))


@pytest.mark.parametrize(
    ("scales", "loaded"),
    [
        ({"q": torch.tensor(1.0), "k": torch.tensor([2.0]), "v": torch.tensor([[3.0]])}, [1, 2, 3]),
        ({"qkv": torch.tensor([1.0, 2.0, 3.0])}, [1, 2, 3]),
        ({"qkv": torch.tensor(4.0)}, [4, 4, 4]),
    ],
    ids=["one each", "a vector of a merged file", "one for a merged file"],
)
def test_each_part_has_its_scalar(tmp_path: Path, scales: dict[str, Tensor], loaded: list[int]) -> None:
    model = Model({"scale": (PART,)})
    load(tmp_path, model, "scale", scales)
    assert model.qkv_proj.scale.tolist() == loaded


@pytest.mark.parametrize("dims", [(), (IN,)], ids=["scalar", "vector"])
def test_scales_that_would_overwrite_one_another_are_refused_by_name(tmp_path: Path, dims: tuple[Dim, ...]) -> None:
    model = Model({"scale": dims})
    scales = {part: torch.full([200] * len(dims), float(i)) for i, part in enumerate("qkv")}
    with pytest.raises(WeightError) as error:
        load(tmp_path, model, "scale", scales)
    assert "2 overlapping" in str(error.value)
    for tensor in ("v_proj", "q_proj"):
        assert f"{tensor}.scale: writes all of qkv_proj.scale, and k_proj.scale writes all" in str(error.value)
    assert "likely cause: tensors that overlap are no fault of the checkpoint" in str(error.value)


def test_experts_have_the_layout_of_linears_with_one_more_dimension() -> None:
    ctx = context({}, 1, 4)
    layout = MatrixLayout((cut(ctx, 0, 768), cut(ctx, 1, 768)), whole(None, 200))
    axis = ExpertAxis((-1, 0, 1))
    spec, scalar = ParamSpec(FLOAT, (ROWS, COLUMNS)), ParamSpec(FLOAT, (PART,))
    scales = layout.parameter(spec, "scale", axis.local)
    assert scales.shape == (2, 4, 2)
    scales.data.zero_()
    stored = torch.rand(3, 6, 2)
    for expert, part in ((0, 1), (2, 1), (None, 0)):
        place = axis.placement(layout.placement(scales, spec, part), expert)
        if place is not None:
            tensor = stored if expert is None else stored[expert]
            assert tensor.shape == place.shape
            scales.data[place.target] = tensor[place.source]
    assert torch.equal(scales[:, :2], stored[1:, 1:3])
    assert torch.equal(scales[:, 2:], torch.stack([torch.zeros(2, 2), stored[2, 1:3]]))
    each = layout.parameter(scalar, "scale", axis.local)
    place = axis.placement(layout.placement(each, scalar, 1), 2)
    assert place is not None
    assert (place.shape, each[place.target].shape, place.target) == ((), (), (1, 1))
    with pytest.raises(KeyError):
        axis.placement(place, 3)
    with pytest.raises(KeyError):
        layout.placement(each, scalar, None)
