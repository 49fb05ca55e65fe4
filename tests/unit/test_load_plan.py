"""The load plan: every tensor finds its home, or the problem and its likely cause are named; no weights are read."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rapid_infer.errors import WeightError
from rapid_infer.layers.parameter import Elsewhere, Placement
from rapid_infer.layers.stack import LayerStack
from rapid_infer.loader.copies import Copy
from rapid_infer.loader.coverage import find_overlaps
from rapid_infer.loader.headers import TensorInfo
from rapid_infer.loader.index_map import transpose
from rapid_infer.loader.inventory import Inventory
from rapid_infer.loader.plan import LoadPlan, plan_load
from rapid_infer.loader.problems import Kind, format_ranges, group_names
from rapid_infer.loader.rules import experts, ignore, rename, split, stack, tie
from rapid_infer.loader.weight_map import WeightMap

HIDDEN, HEAD, EXPERTS, LAYERS, VOCAB = 8, 4, 4, 3, 12
QKV_ROWS = {"q": 16, "k": 8, "v": 8}

TABLE = WeightMap(
    [
        experts(("gate_proj", "up_proj"), "gate_up_proj"),
        stack(("q_proj", "k_proj", "v_proj"), "qkv_proj", parts=("q", "k", "v")),
        stack(("gate_proj", "up_proj"), "gate_up_proj"),
        tie("lm_head", "model.embed_tokens"),
    ]
)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def plain(*shape: int) -> nn.Module:
    module = nn.Module()
    module.weight = empty(*shape)
    return module


class Rows(nn.Module):
    """Parts of given rows, one above the other, each cut over the ranks by rows."""

    def __init__(self, rows: dict, columns: int, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.rows, self.rank, self.ranks = rows, rank, ranks
        self.weight = empty(sum(rows.values()) // ranks, columns)

    def parts(self, leaf: str) -> tuple:
        return tuple(self.rows)

    def placement(self, leaf: str, part=None, expert: int | None = None) -> Placement | None:
        if leaf != "weight" or expert is not None:
            raise KeyError(leaf)
        rows = self.rows[part] // self.ranks
        names = list(self.rows)
        start = sum(self.rows[name] for name in names[: names.index(part)]) // self.ranks
        return Placement(
            self.weight,
            (self.rows[part], self.weight.shape[1]),
            (slice(self.rank * rows, (self.rank + 1) * rows),),
            (slice(start, start + rows),),
        )


class Columns(nn.Module):
    def __init__(self, rows: int, columns: int, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.full, self.cut = (rows, columns), slice(rank * columns // ranks, (rank + 1) * columns // ranks)
        self.weight = empty(rows, columns // ranks)

    def parts(self, leaf: str) -> tuple:
        return (None,)

    def placement(self, leaf: str, part=None, expert: int | None = None) -> Placement | None:
        if (leaf, part, expert) != ("weight", None, None):
            raise KeyError(leaf)
        return Placement(self.weight, self.full, (slice(None), self.cut))


class Experts(nn.Module):
    """Whole experts spread over the ranks; parts 0 and 1 of each one above the other."""

    def __init__(self, count: int, rows: int, columns: int, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.count, self.rows, self.local, self.rank = count, rows, count // ranks, rank
        self.weight = empty(self.local, 2 * rows, columns)

    def parts(self, leaf: str) -> tuple:
        return (0, 1)

    def placement(self, leaf: str, part=None, expert: int | None = None) -> Placement | None:
        if leaf != "weight" or part not in (0, 1) or not 0 <= (expert or 0) < self.count:
            raise KeyError(leaf)
        rows = slice(part * self.rows, (part + 1) * self.rows)
        first, columns = self.rank * self.local, self.weight.shape[2]
        if expert is None:
            mine = slice(first, first + self.local)
            return Placement(self.weight, (self.count, self.rows, columns), (mine,), (slice(None), rows))
        if not first <= expert < first + self.local:
            return None
        return Placement(self.weight, (self.rows, columns), (), (expert - first, rows))


class Model(nn.Module):
    def __init__(self, rank: int = 0, ranks: int = 1, *, tied: bool = False, moe: bool = True) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = plain(VOCAB, HIDDEN)
        self.model.norm = plain(HIDDEN)
        self.model.layers = nn.ModuleList(self.layer(rank, ranks, moe) for _ in range(LAYERS))
        self.lm_head = plain(VOCAB, HIDDEN)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def layer(self, rank: int, ranks: int, moe: bool) -> nn.Module:
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.qkv_proj = Rows(QKV_ROWS, HIDDEN, rank, ranks)
        layer.self_attn.o_proj = Columns(HIDDEN, 16, rank, ranks)
        layer.self_attn.q_norm = plain(HEAD)
        layer.mlp = nn.Module()
        if moe:
            layer.mlp.experts = nn.Module()
            layer.mlp.experts.gate_up_proj = Experts(EXPERTS, 6, HIDDEN, rank, ranks)
        else:
            layer.mlp.gate_up_proj = Rows({0: 24, 1: 24}, HIDDEN, rank, ranks)
        return layer


def checkpoint(layers: int = LAYERS, moe: bool = True) -> dict[str, torch.Tensor]:
    """Exactly what `Model(tied=False)` wants, under the usual names."""
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "model.norm.weight": torch.zeros(HIDDEN)}
    for number in range(layers):
        attn, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        for part, rows in QKV_ROWS.items():
            tensors[f"{attn}.{part}_proj.weight"] = torch.zeros(rows, HIDDEN)
        tensors[f"{attn}.o_proj.weight"] = torch.zeros(HIDDEN, 16)
        tensors[f"{attn}.q_norm.weight"] = torch.zeros(HEAD)
        for source in ("gate_proj", "up_proj"):
            for expert in range(EXPERTS) if moe else ():
                tensors[f"{mlp}.experts.{expert}.{source}.weight"] = torch.zeros(6, HIDDEN)
            if not moe:
                tensors[f"{mlp}.{source}.weight"] = torch.zeros(24, HIDDEN)
    return tensors | {"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}


def plan(folder: Path, tensors: dict, model: nn.Module | None = None, table: WeightMap = TABLE) -> LoadPlan:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return plan_load(model or Model(), table, Inventory.scan(folder))


def refusal(made: LoadPlan) -> str:
    with pytest.raises(WeightError) as caught:
        made.check()
    return str(caught.value)


def details(made: LoadPlan, kind: Kind) -> dict[str, str]:
    return {problem.name: problem.detail for problem in made.problems if problem.kind is kind}


# --- plans that hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moe", [True, False])
def test_a_matching_checkpoint_fills_a_meta_model(tmp_path: Path, moe: bool) -> None:
    tensors = checkpoint(moe=moe)
    made = plan(tmp_path, tensors, Model(moe=moe))
    made.check()
    assert made.problems == ()
    assert made.causes == ()
    assert len(made.copies) == len(tensors)
    assert made.bytes_to_read == sum(tensor.nbytes for tensor in tensors.values())
    offsets = [copy.info.offset for copy in made.copies]
    assert offsets == sorted(offsets)


def test_each_rank_reads_its_share(tmp_path: Path) -> None:
    tensors = checkpoint()
    whole = sum(
        tensor.nbytes for name, tensor in tensors.items() if "norm" in name or "embed" in name or "head" in name
    )
    cut = sum(tensor.nbytes for tensor in tensors.values()) - whole
    made = [plan(tmp_path, tensors, Model(rank, 2)) for rank in range(2)]
    for one in made:
        one.check()
        assert one.bytes_to_read == whole + cut // 2
    for one, mine in zip(made, ({"0", "1"}, {"2", "3"})):
        assert {copy.info.name.split(".")[5] for copy in one.copies if ".experts." in copy.info.name} == mine
        assert {name.split(".")[5] for name in one.elsewhere} == {"0", "1", "2", "3"} - mine


def test_all_experts_in_one_tensor_and_merged_parts_are_cut_up(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in checkpoint().items() if "experts" not in name and "_proj" not in name}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        tensors[f"{layer}.mlp.experts.gate_up_proj"] = torch.zeros(EXPERTS, 12, HIDDEN)
        tensors[f"{layer}.self_attn.qkv_proj.weight"] = torch.zeros(32, HIDDEN)
        tensors[f"{layer}.self_attn.o_proj.weight"] = torch.zeros(HIDDEN, 16)
    total = sum(tensor.nbytes for tensor in tensors.values())
    for ranks in (1, 2):
        for rank in range(ranks):
            made = plan(tmp_path, tensors, Model(rank, ranks))
            made.check()
            assert made.bytes_to_read < total or ranks == 1
    wrong = tensors | {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(33, HIDDEN)}
    text = refusal(plan(tmp_path, wrong))
    assert "checkpoint [33, 8] cannot be cut into parts of shapes [[16, 8], [8, 8], [8, 8]]" in text
    assert "missing" not in text


@pytest.mark.parametrize("here", [(), ("q",), ("q", "k", "v")])
def test_merged_parts_of_which_other_ranks_keep_some(tmp_path: Path, here: tuple) -> None:
    class Remote(Rows):
        def placement(self, leaf: str, part=None, expert: int | None = None) -> Placement | None:
            placement = super().placement(leaf, part, expert)
            return placement if part in here else None

    model = nn.Module()
    model.qkv_proj = Remote(QKV_ROWS, HIDDEN)
    made = plan(tmp_path, {"qkv_proj.weight": torch.zeros(32, HIDDEN)}, model)
    assert len(made.copies) == (3 if len(here) == 3 else 0)
    assert made.names(Kind.UNEXPECTED) == (["qkv_proj.weight"] if len(here) == 1 else [])
    plan(tmp_path, {f"{part}_proj.weight": torch.zeros(rows, HIDDEN) for part, rows in QKV_ROWS.items()}, model).check()


def test_the_layers_of_another_stage_are_known_to_be_elsewhere(tmp_path: Path) -> None:
    """The first of two stages: layers 0 and 1 of 4, the embedding, neither norm nor head."""
    model = Model()
    model.model.layers = LayerStack({number: model.layer(0, 1, moe=True) for number in (0, 1)}, 4)
    model.model.norm, model.lm_head = Elsewhere(), Elsewhere()
    tensors = checkpoint(layers=4)
    there = [
        name for name in tensors if name.startswith(("model.layers.2.", "model.layers.3.", "model.norm", "lm_head"))
    ]
    made = plan(tmp_path, tensors, model)
    made.check()
    assert sorted(made.elsewhere) == sorted(there)
    assert {copy.info.name for copy in made.copies} == set(tensors) - set(there)
    # What is nobody's is still unexpected, and what is missing here still missing.
    unknown = {f"model.layers.{where}.weight": torch.zeros(1) for where in ("4.norm", "1.bogus", "01.norm")}
    unknown |= {"model.norms.weight": torch.zeros(1), "model.layer.2.weight": torch.zeros(1)}
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    made = plan(tmp_path, tensors | unknown, model)
    assert sorted(made.names(Kind.UNEXPECTED)) == sorted(unknown)
    assert made.names(Kind.MISSING) == ["model.layers.1.self_attn.q_norm.weight"]
    # Half of this one is wanted here.
    both = nn.Module()
    both.a, both.b = plain(2, HIDDEN), Elsewhere()
    made = plan(
        tmp_path, {"ab.weight": torch.zeros(4, HIDDEN)}, both, WeightMap([split("ab", [("a", None), ("b", None)])])
    )
    made.check()
    assert (len(made.copies), made.elsewhere) == (1, ())


def test_ignored_tensors_are_listed_with_the_reason(tmp_path: Path) -> None:
    tensors = checkpoint() | {"mtp.0.weight": torch.zeros(1)}
    made = plan(tmp_path, tensors, table=TABLE + WeightMap([ignore("mtp.**", "draft layer")]))
    made.check()
    assert made.ignored == {"mtp.0.weight": "draft layer"}


def test_buffers_need_no_weights_and_take_none(tmp_path: Path) -> None:
    model = Model()
    model.model.register_buffer("inv_freq", torch.zeros(2))
    plan(tmp_path, checkpoint(), model).check()
    text = refusal(plan(tmp_path, checkpoint() | {"model.inv_freq": torch.zeros(2)}, model))
    assert "model.inv_freq is a buffer, and buffers take no weights" in text


ATTENTION = "model.layers.0.self_attn"
MASK = torch.zeros(1, 1, 4, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.rotary_emb.inv_freq", torch.zeros(2)),
        ("rotary_emb.inv_freq", torch.zeros(2)),
        ("layers.0.self_attn.rotary_emb.cos_cached", torch.zeros(1, 1, 4, 4)),
        (f"{ATTENTION}.rotary_emb.inv_freq", torch.zeros(2)),
        (f"{ATTENTION}.rotary_emb.cos_cached", torch.zeros(4, 4)),
        (f"{ATTENTION}.rotary_emb.sin_cached", torch.zeros(4, 4)),
        ("transformer.rotary_pos_emb.inv_freq", torch.zeros(2, dtype=torch.float16)),
        (f"{ATTENTION}.bias", MASK),
        (f"{ATTENTION}.bias", MASK.float()),
        (f"{ATTENTION}.masked_bias", torch.tensor(-1e4)),
        ("transformer.h.0.attn.masked_bias", torch.zeros(1)),
        ("gpt_neox.layers.0.attention.bias", MASK),
        ("transformer.h.0.attn.causal_mask", MASK),
        ("embeddings.position_ids", torch.zeros(1, 4, dtype=torch.int64)),
    ],
)
def test_tensors_that_are_known_to_be_computed_are_ignored(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    made = plan(tmp_path, checkpoint() | {name: tensor})
    made.check()
    assert list(made.ignored) == [name]
    assert "computed" in made.ignored[name]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (f"{ATTENTION}.bias", torch.zeros(HIDDEN)),
        (f"{ATTENTION}.bias", torch.zeros(1, 1, 4, 5)),
        (f"{ATTENTION}.bias", torch.zeros(4, 4)),
        (f"{ATTENTION}.qkv_proj.bias", MASK),
        (f"{ATTENTION}.masked_bias", torch.zeros(4)),
        ("model.norm.bias", torch.zeros(1, 1, 4, 4)),
        ("model.inv_freq", torch.zeros(2)),
        ("model.rotary_emb.weight", torch.zeros(2)),
        ("embeddings.position_ids", torch.zeros(1, 4)),
    ],
)
def test_what_could_be_a_weight_is_never_taken_for_a_computed_one(
    tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    made = plan(tmp_path, checkpoint() | {name: tensor})
    assert made.names(Kind.UNEXPECTED) == [name]
    assert made.ignored == {}


def test_a_parameter_under_a_computed_name_is_filled(tmp_path: Path) -> None:
    model = Model()
    model.model.rotary_emb, attention = nn.Module(), model.model.layers[0].self_attn
    model.model.rotary_emb.inv_freq = empty(2)
    attention.bias, attention.masked_bias = empty(1, 1, 4, 4), empty()
    own = {"model.rotary_emb.inv_freq": torch.zeros(2), f"{ATTENTION}.bias": torch.zeros(1, 1, 4, 4)}
    made = plan(tmp_path, checkpoint() | own | {f"{ATTENTION}.masked_bias": torch.zeros(())}, model)
    made.check()
    assert made.ignored == {}
    assert set(own) < {copy.info.name for copy in made.copies}


def test_a_parameter_that_wants_no_piece_is_not_missing(tmp_path: Path) -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = empty(3)

        def parts(self, leaf: str) -> tuple:
            return ()

        def placement(self, leaf: str, part=None, expert=None) -> None:
            raise KeyError(leaf)

    model = Model()
    model.computed = Computed()
    plan(tmp_path, checkpoint(), model).check()


# --- ties -------------------------------------------------------------------------------------------------------------


def test_tied_models_skip_the_second_copy(tmp_path: Path) -> None:
    made = plan(tmp_path, checkpoint(), Model(tied=True))
    made.check()
    assert made.ignored == {"lm_head.weight": "tied"}


@pytest.mark.parametrize("present", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_name_of_a_tied_parameter_will_do(tmp_path: Path, present: str) -> None:
    absent = {"lm_head.weight", "model.embed_tokens.weight"} - {present}
    made = plan(
        tmp_path, {name: tensor for name, tensor in checkpoint().items() if name not in absent}, Model(tied=True)
    )
    made.check()
    assert made.ignored == {}
    assert present in {copy.info.name for copy in made.copies}
    offsets = [copy.info.offset for copy in made.copies]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize(
    ("head", "rule"),
    [
        (torch.ones(VOCAB, HIDDEN), []),
        (torch.ones(HIDDEN, VOCAB), [rename("lm_head", "lm_head", at_start=True, index=transpose())]),
        # Equal in the model's type is equal.
        (torch.ones(VOCAB, HIDDEN, dtype=torch.float64) + 1e-12, []),
        (torch.ones(VOCAB, HIDDEN, dtype=torch.bfloat16), []),
    ],
    ids=["same", "transposed", "wider", "narrower"],
)
def test_ties_are_compared_by_value_in_the_type_and_layout_of_the_model(
    tmp_path: Path, head: torch.Tensor, rule: list
) -> None:
    tensors = checkpoint() | {"model.embed_tokens.weight": torch.ones(VOCAB, HIDDEN), "lm_head.weight": head}
    model = Model(tied=True)
    made = plan(tmp_path, tensors, model, WeightMap(rule) + TABLE)
    made.check()
    assert (made.ignored, made.untied) == ({"lm_head.weight": "tied"}, ())
    head[-1, -1] = 2
    made = plan(tmp_path, tensors, model, WeightMap(rule) + TABLE)
    made.check()
    assert (made.ignored, made.untied) == ({}, ("lm_head.weight",))
    assert made.bytes_to_read == sum(tensor.nbytes for tensor in tensors.values())
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_unties_where_any_row_differs(tmp_path: Path, rank: int) -> None:
    model = nn.Module()
    model.embed, model.head = (Rows({None: VOCAB}, HIDDEN, rank, 2) for _ in range(2))
    model.head.weight = model.embed.weight
    tensors = {"embed.weight": torch.zeros(VOCAB, HIDDEN), "head.weight": torch.zeros(VOCAB, HIDDEN)}
    assert plan(tmp_path, tensors, model, WeightMap([tie("head", "embed")])).untied == ()
    tensors["head.weight"][-1] = 1
    made = plan(tmp_path, tensors, model, WeightMap([tie("head", "embed")]))
    made.check()
    assert made.untied == ("head.weight",)


def test_a_tied_head_of_another_shape_is_a_problem(tmp_path: Path) -> None:
    made = plan(tmp_path, checkpoint() | {"lm_head.weight": torch.zeros(VOCAB + 1, HIDDEN)}, Model(tied=True))
    assert "checkpoint [13, 8], model [12, 8] for lm_head.weight" in refusal(made)


@pytest.mark.parametrize("present", [(), ("a",), ("b",), ("a", "b")])
@pytest.mark.parametrize("second", [0.0, 1.0], ids=["equal", "other"])
def test_each_part_of_a_tensor_that_repeats_several_is_settled_on_its_own(
    tmp_path: Path, present: tuple[str, ...], second: float
) -> None:
    model = nn.Module()
    model.a, model.b, model.head_a, model.head_b = (plain(2, 2) for _ in range(4))
    model.head_a.weight, model.head_b.weight = model.a.weight, model.b.weight
    table = WeightMap([split("heads", [("head_a", None), ("head_b", None)]), tie("head_a", "a"), tie("head_b", "b")])
    heads = torch.cat([torch.zeros(2, 2), torch.full((2, 2), second)])
    tensors = {"heads.weight": heads} | {f"{name}.weight": torch.zeros(2, 2) for name in present}
    made = plan(tmp_path, tensors, model, table)
    made.check()
    untied = bool(second) and "b" in present
    assert made.untied == (("heads.weight",) if untied else ())
    assert (model.head_b.weight is model.b.weight) is not untied
    assert model.head_a.weight is model.a.weight
    assert made.ignored == ({"heads.weight": "tied"} if len(present) == 2 and not untied else {})


@pytest.mark.parametrize(
    ("names", "untied"),
    [
        (("q_head", "k_head"), ()),
        (("q_embed", "k_embed"), ()),
        (("q_head", "k_head", "q_embed", "k_embed"), ("k_head.weight",)),
        (("head", "q_embed", "k_embed"), ("head.weight",)),
        (("q_head", "k_head", "embed"), ("k_head.weight",)),
    ],
)
def test_a_head_in_pieces(tmp_path: Path, names: tuple[str, ...], untied: tuple[str, ...]) -> None:
    values = {name: torch.zeros(2, 2) for name in names} | {"k_head": torch.ones(2, 2)}
    values |= {"head": torch.tensor([[0.0, 0], [0, 0], [1, 1], [1, 1]]), "embed": torch.zeros(4, 2)}
    table = WeightMap(
        [stack(("q_head", "k_head"), "head", "qk"), stack(("q_embed", "k_embed"), "embed", "qk"), tie("head", "embed")]
    )
    model = nn.Module()
    model.embed, model.head = (Rows({"q": 2, "k": 2}, 2) for _ in range(2))
    model.head.weight = model.embed.weight
    made = plan(tmp_path, {f"{name}.weight": values[name] for name in names}, model, table)
    made.check()
    assert made.untied == untied


def test_untied_models_take_both(tmp_path: Path) -> None:
    made = plan(tmp_path, checkpoint())
    made.check()
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {copy.info.name for copy in made.copies}


def test_an_untied_model_without_head(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["lm_head.weight"]
    made = plan(tmp_path, tensors)
    assert made.names(Kind.MISSING) == ["lm_head.weight"]
    assert "tie_word_embeddings" in refusal(made)


def test_a_shared_parameter_is_missing_once_under_its_first_name(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    assert plan(tmp_path, tensors, Model(tied=True)).names(Kind.MISSING) == ["model.embed_tokens.weight"]


def test_a_shared_parameter_without_a_tie_rule_is_filled_twice(tmp_path: Path) -> None:
    made = plan(tmp_path, checkpoint(), Model(tied=True), WeightMap(TABLE.rules[:-1]))
    assert len(made.names(Kind.TWICE)) == 1
    assert "is already filled by" in refusal(made)


# --- problems ---------------------------------------------------------------------------------------------------------


def test_forgotten_norms_are_missing(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in checkpoint().items() if "q_norm" not in name}
    text = refusal(plan(tmp_path, tensors))
    assert "does not fill Model: 3 missing\n" in text
    assert "  model.layers.{0..2}.self_attn.q_norm.weight (3)" in text.splitlines()


def test_norms_that_the_model_forgot_are_unexpected(tmp_path: Path) -> None:
    model = Model()
    for layer in model.model.layers:
        del layer.self_attn.q_norm
    made = plan(tmp_path, checkpoint(), model)
    assert len(made.names(Kind.UNEXPECTED)) == LAYERS
    assert "model.layers.{0..2}.self_attn.q_norm.weight (3): the model has no module" in refusal(made)


def test_unexpected_leaf_piece_and_expert(tmp_path: Path) -> None:
    tensors = checkpoint() | {
        "model.norm.bias": torch.zeros(1),
        "model.layers.0.mlp.experts.7.up_proj.weight": torch.zeros(6, HIDDEN),
        "model.layers.1.self_attn.o_proj.bias": torch.zeros(1),
    }
    found = details(plan(tmp_path, tensors), Kind.UNEXPECTED)
    assert found["model.norm.bias"] == "Module has no parameter bias"
    assert found["model.layers.0.mlp.experts.7.up_proj.weight"].startswith("Experts does not take piece 1 of expert 7")
    assert found["model.layers.1.self_attn.o_proj.bias"] == "Columns has no parameter bias"


def test_partly_filled_parts_are_named(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in checkpoint().items() if "k_proj" not in name and "v_proj" not in name}
    made = plan(tmp_path, tensors)
    assert made.names(Kind.PARTLY_FILLED) == [f"model.layers.{n}.self_attn.qkv_proj.weight" for n in range(LAYERS)]
    assert made.names(Kind.MISSING) == []
    assert "model.layers.{0..2}.self_attn.qkv_proj.weight (3): lacks k, v" in refusal(made)


def test_partly_filled_experts_are_named_by_their_global_number(tmp_path: Path) -> None:
    tensors = checkpoint()
    for gone in ("3.up_proj", "2.up_proj", "2.gate_proj"):
        del tensors[f"model.layers.1.mlp.experts.{gone}.weight"]
    made = plan(tmp_path, tensors, Model(rank=1, ranks=2))
    assert details(made, Kind.PARTLY_FILLED) == {
        "model.layers.1.mlp.experts.gate_up_proj.weight": "lacks expert 2, expert 3 (1)"
    }
    # The other rank keeps neither of them.
    plan(tmp_path, tensors, Model(rank=0, ranks=2)).check()


def test_no_local_expert_at_all_is_missing(tmp_path: Path) -> None:
    tensors = {
        n: t
        for n, t in checkpoint().items()
        if not n.startswith(tuple(f"model.layers.0.mlp.experts.{e}" for e in "23"))
    }
    made = plan(tmp_path, tensors, Model(rank=1, ranks=2))
    assert made.names(Kind.MISSING) == ["model.layers.0.mlp.experts.gate_up_proj.weight"]


def test_shape_mismatch_gives_both_shapes(tmp_path: Path) -> None:
    tensors = checkpoint() | {"model.layers.1.self_attn.q_proj.weight": torch.zeros(15, HIDDEN)}
    made = plan(tmp_path, tensors)
    assert [(problem.got, problem.expected) for problem in made.problems] == [((15, HIDDEN), (16, HIDDEN))]
    assert "checkpoint [15, 8], model [16, 8] for model.layers.1.self_attn.qkv_proj.weight[q]" in refusal(made)


def test_one_value_fits_whatever_its_shape_is_called(tmp_path: Path) -> None:
    model = Model()
    model.scale = nn.Module()
    model.scale.weight, model.scale.other = empty(1), empty()
    plan(tmp_path, checkpoint() | {"scale.weight": torch.zeros(()), "scale.other": torch.zeros(1)}, model).check()


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
def test_floats_are_cast(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    model = Model()
    model.model.norm.weight = empty(HIDDEN, dtype=wanted)
    plan(tmp_path, checkpoint() | {"model.norm.weight": torch.zeros(HIDDEN, dtype=stored)}, model).check()


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.int8, torch.bfloat16),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float32),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.int32),
        (torch.int32, torch.int64),
        (torch.float8_e5m2, torch.float8_e4m3fn),
        (torch.uint8, torch.int16),
    ],
)
def test_other_types_are_never_cast(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    model = Model()
    model.model.norm.weight = empty(HIDDEN, dtype=wanted)
    text = refusal(plan(tmp_path, checkpoint() | {"model.norm.weight": torch.zeros(HIDDEN).to(stored)}, model))
    names = [str(dtype).removeprefix("torch.") for dtype in (stored, wanted)]
    assert f"model.norm.weight: checkpoint {names[0]}, model {names[1]} for model.norm.weight" in text
    model.model.norm.weight = empty(HIDDEN, dtype=stored)
    plan(tmp_path, checkpoint() | {"model.norm.weight": torch.zeros(HIDDEN).to(stored)}, model).check()


def test_filled_twice(tmp_path: Path) -> None:
    table = WeightMap([rename("wq", "q_proj")]) + TABLE
    made = plan(tmp_path, checkpoint() | {"model.layers.0.self_attn.wq.weight": torch.zeros(16, HIDDEN)}, table=table)
    first = "model.layers.0.self_attn.q_proj.weight"
    second = "model.layers.0.self_attn.wq.weight"
    assert details(made, Kind.TWICE) == {
        second: f"model.layers.0.self_attn.qkv_proj.weight[q] is already filled by {first}"
    } or details(made, Kind.TWICE) == {
        first: f"model.layers.0.self_attn.qkv_proj.weight[q] is already filled by {second}"
    }
    assert "1 filled twice" in refusal(made)


@pytest.mark.parametrize(
    ("name", "shape", "pieces"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", (EXPERTS, 12, HIDDEN), 2),
        ("model.layers.0.mlp.experts.up_proj", (EXPERTS, 6, HIDDEN), 1),
        ("model.layers.0.self_attn.o_proj_again.weight", (HIDDEN, 16), 1),
        ("model.layers.0.self_attn.z_qkv.weight", (32, HIDDEN), 3),
    ],
)
def test_the_whole_and_its_pieces_fill_twice(tmp_path: Path, name: str, shape: tuple, pieces: int) -> None:
    again = WeightMap([rename("o_proj_again", "o_proj"), rename("z_qkv", "qkv_proj")])
    made = plan(tmp_path, checkpoint() | {name: torch.zeros(shape)}, table=TABLE + again)
    assert {problem.kind for problem in made.problems} == {Kind.TWICE}
    assert made.names(Kind.TWICE) == [name] * pieces


class Wholes(nn.Module):
    """Takes each of two experts whole or in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = empty(2, 4, HIDDEN)

    def parts(self, leaf: str) -> tuple:
        return (0, 1)

    def placement(self, leaf: str, part=None, expert: int | None = None) -> Placement:
        rows = slice(0, 4) if part is None else slice(2 * part, 2 * part + 2)
        slot = slice(None) if expert is None else expert
        shape = (2,) * (expert is None) + (rows.stop - rows.start, HIDDEN)
        return Placement(self.weight, shape, (), (slot, rows))


@pytest.mark.parametrize(
    "names",
    [
        ["a.0.g", "a.0.u", "a.1.g", "a.1.u"],
        ["a.0.g_u", "a.1.g", "a.1.u"],
        ["a.g", "a.u"],
        ["a.g", "a.0.u", "a.1.u"],
        ["a.g_u"],
    ],
)
@pytest.mark.parametrize("extra", ["", "b.0.g", "b.1.g_u", "b.u", "b.g_u"])
def test_any_mix_of_wholes_and_pieces_is_accounted_for(tmp_path: Path, names: list[str], extra: str) -> None:
    model = nn.Module()
    model.a = nn.Module()
    model.a.g_u = Wholes()
    rows = {"g": 2, "u": 2, "g_u": 4}
    tensors = {}
    for name in [*names, extra] if extra else names:
        expert, leaf = name.split(".")[1:-1], name.split(".")[-1]
        shape = (rows[leaf], HIDDEN) if expert else (2, rows[leaf], HIDDEN)
        tensors[f"{name}.weight"] = torch.zeros(shape)
    table = WeightMap([rename("b", "a", at_start=True), experts(("g", "u"), "g_u", under="a")])
    made = plan(tmp_path, tensors, model, table)
    assert made.names(Kind.TWICE) == ([f"{extra}.weight"] if extra else [])
    assert len(made.problems) == bool(extra)
    for gone in list(tensors)[: len(names)]:
        rest = {name: tensor for name, tensor in tensors.items() if name != gone and not name.startswith("b")}
        if rest:
            assert plan(tmp_path, rest, model, table).names(Kind.PARTLY_FILLED) == ["a.g_u.weight"]


def test_overlaps_are_found_wherever_two_copies_meet() -> None:
    """Against writing each value; regions of experts, rows and columns, some empty, at random."""
    chance = random.Random(0)

    def cut(size: int) -> slice:
        start = chance.randrange(size)
        return slice(start, start + chance.randrange(3))

    for _ in range(200):
        params = [empty(4, 5, 6), empty(4, 5, 6)]
        copies = []
        for number in range(chance.randrange(2, 7)):
            target = (chance.choice([cut(4), chance.randrange(4)]), cut(5), cut(6))[: chance.randrange(4)]
            info = TensorInfo(f"t{number}", (), torch.float32, Path("file"), 0, 0)
            copies.append(Copy(info, Placement(chance.choice(params), (), (), target)))
        written = [torch.zeros(2, 4, 5, 6) for _ in copies]
        for copy, where in zip(copies, written):
            where[int(copy.placement.param is params[1])][copy.placement.target] = 1
        meet = {(a, b) for a in range(len(copies)) for b in range(len(copies)) if (written[a] * written[b]).any()}
        clash = {b for a, b in meet if a != b}
        found = [(copies.index(one), copies.index(other)) for one, other in find_overlaps(copies)]
        assert set(found) <= meet
        assert {number for pair in found for number in pair} <= clash
        # One of those that meet may stay.
        kept = set(range(len(copies))) - {other for _, other in found}
        assert not any((a, b) in meet for a in kept for b in kept if a != b)


def test_a_layout_that_cannot_be_is_a_shape_problem(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in checkpoint(moe=False).items() if ".0.mlp" not in name}
    tensors["model.layers.0.mlp.fused.weight"] = torch.zeros(47, HIDDEN)
    table = WeightMap([split("fused", into=(("gate_up_proj", 0), ("gate_up_proj", 1)))]) + TABLE
    text = refusal(plan(tmp_path, tensors, Model(moe=False), table))
    assert "47 entries of dimension 0 cannot be cut (1, 1)" in text
    assert "missing" not in text
    assert "partly filled" not in text


def test_a_layer_whose_cut_does_not_add_up_is_a_fault_of_the_layer(tmp_path: Path) -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = empty(4)

        def parts(self, leaf: str) -> tuple:
            return (None,)

        def placement(self, leaf: str, part=None, expert=None) -> Placement:
            return Placement(self.weight, (HIDDEN,), (slice(0, 1),), (slice(0, 4),))

    model = Model()
    model.model.norm = Wrong()
    with pytest.raises(AssertionError, match=r"takes \[1\] of the tensor for a region of \[4\]"):
        plan(tmp_path, checkpoint(), model)


def test_all_problems_are_printed_together(tmp_path: Path) -> None:
    tensors = checkpoint() | {"model.norm.weight": torch.zeros(3), "extra.weight": torch.zeros(1)}
    del tensors["model.layers.1.self_attn.q_norm.weight"], tensors["model.layers.2.self_attn.v_proj.weight"]
    text = refusal(plan(tmp_path, tensors))
    assert text.startswith(
        f"{tmp_path} does not fill Model: 1 missing, 1 unexpected, 1 partly filled, 1 shape mismatch\n"
    )
    for line in (
        "missing (parameters that no tensor fills): 1",
        "  model.layers.1.self_attn.q_norm.weight",
        "  extra.weight: the model has no module extra",
        "  model.layers.2.self_attn.qkv_proj.weight: lacks v",
        "  model.norm.weight: checkpoint [3], model [8] for model.norm.weight",
    ):
        assert line in text.splitlines()


# --- likely causes ----------------------------------------------------------------------------------------------------


def test_an_extra_prefix(tmp_path: Path) -> None:
    tensors = {f"language_model.{n}" if n.startswith("model.") else n: t for n, t in checkpoint().items()}
    made = plan(tmp_path, tensors)
    text = refusal(made)
    count = len(tensors) - 1
    assert (
        f"{count} of {count} unexpected tensors are under 'language_model.model.' where the model has 'model.'" in text
    )
    assert 'rename("language_model.model", "model", at_start=True)' in text
    fixed = WeightMap([rename("language_model.model", "model", at_start=True)]) + TABLE
    plan(tmp_path, tensors, table=fixed).check()


def test_an_extra_prefix_before_everything(tmp_path: Path) -> None:
    tensors = {f"module.{name}": tensor for name, tensor in checkpoint().items()}
    assert 'rename("module", "", at_start=True)' in refusal(plan(tmp_path, tensors))
    plan(tmp_path, tensors, table=WeightMap([rename("module", "", at_start=True)]) + TABLE).check()


def test_an_extra_prefix_among_unwanted_tensors(tmp_path: Path) -> None:
    tensors = {f"language_model.{n}" if n.startswith("model.") else n: t for n, t in checkpoint().items()}
    tensors |= {f"visual.blocks.{number}.weight": torch.zeros(1) for number in range(5)}
    text = refusal(plan(tmp_path, tensors))
    assert 'rename("language_model.model", "model", at_start=True)' in text
    assert "visual.blocks.{0..4}.weight (5)" in text


def test_a_missing_prefix(tmp_path: Path) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoint().items()}
    text = refusal(plan(tmp_path, tensors))
    rules = [rename(name, f"model.{name}", at_start=True) for name in ("layers", "norm", "embed_tokens")]
    for name in ("layers", "norm", "embed_tokens"):
        assert f'rename("{name}", "model.{name}", at_start=True)' in text
    plan(tmp_path, tensors, table=WeightMap(rules) + TABLE).check()


def test_a_foreign_head(tmp_path: Path) -> None:
    tensors = checkpoint()
    tensors["output.weight"] = tensors.pop("lm_head.weight")
    assert 'rename("output", "lm_head", at_start=True)' in refusal(plan(tmp_path, tensors))


def test_no_prefix_is_suggested_when_none_helps(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in checkpoint().items() if "q_norm" not in name}
    tensors |= {f"model.layers.{number}.self_attn.norm.weight": torch.zeros(HEAD) for number in range(LAYERS)}
    assert "rename(" not in refusal(plan(tmp_path, tensors))


def test_weights_already_cut(tmp_path: Path) -> None:
    tensors = {}
    for name, tensor in checkpoint().items():
        if "norm" in name:
            tensors[name] = tensor
        elif "o_proj" in name:
            tensors[name] = tensor.chunk(2, 1)[0].clone()
        else:
            tensors[name] = tensor.chunk(2, 0)[0].clone()
    text = refusal(plan(tmp_path, tensors))
    assert "looks already cut for tensor parallel size 2: load the full checkpoint" in text


def test_other_sizes_are_not_taken_for_a_cut(tmp_path: Path) -> None:
    tensors = {name: tensor[1:].clone() if tensor.ndim > 1 else tensor for name, tensor in checkpoint().items()}
    assert "already cut" not in refusal(plan(tmp_path, tensors))


def test_a_wrong_head_count_is_not_taken_for_a_cut(tmp_path: Path) -> None:
    halves = {n: t[:4].clone() for n, t in checkpoint().items() if "k_proj" in n or "v_proj" in n}
    text = refusal(plan(tmp_path, checkpoint() | halves))
    assert "already cut" not in text
    assert "checkpoint [4, 8], model [8, 8]" in text


def test_matrices_stored_transposed(tmp_path: Path) -> None:
    tensors = checkpoint() | {n: t.T.clone() for n, t in checkpoint().items() if "o_proj" in n}
    assert "index=transpose()" in refusal(plan(tmp_path, tensors))
    table = WeightMap([rename("o_proj", "o_proj", index=transpose())]) + TABLE
    plan(tmp_path, tensors, table=table).check()


@pytest.mark.parametrize("leaf", ["weight_scale_inv", "weight_scale", "qweight", "weight_packed", "scales", "o_blocks"])
def test_quantized_leaves(tmp_path: Path, leaf: str) -> None:
    tensors = checkpoint()
    tensors |= {f"model.layers.{number}.self_attn.o_proj.{leaf}": torch.zeros(1) for number in range(LAYERS)}
    text = refusal(plan(tmp_path, tensors))
    assert f"looks quantized (3 tensors such as model.layers.0.self_attn.o_proj.{leaf})" in text
    assert "quantization_config" in text


def test_quantized_values(tmp_path: Path) -> None:
    tensors = {n: t.to(torch.float8_e4m3fn) if "o_proj" in n else t for n, t in checkpoint().items()}
    text = refusal(plan(tmp_path, tensors))
    assert "looks quantized" in text
    assert "dtype mismatch" in text


def test_absent_layers(tmp_path: Path) -> None:
    tensors = {n: t for n, t in checkpoint().items() if not n.startswith(("model.layers.1.", "model.layers.2."))}
    text = refusal(plan(tmp_path, tensors))
    assert "no tensor of model.layers.{1..2} (2) is there: the download is incomplete" in text


def test_extra_layers(tmp_path: Path) -> None:
    text = refusal(plan(tmp_path, checkpoint(layers=LAYERS + 1)))
    assert "the model has no model.layers.3: config.json promises fewer layers" in text


# --- grouping ---------------------------------------------------------------------------------------------------------


def test_groups_leave_no_name_out() -> None:
    assert group_names(["a.0.b", "a.1.b", "a.2.b", "a.5.b"]) == ["a.{0..2,5}.b (4)"]
    assert group_names(["a.3.b", "c"]) == ["a.3.b", "c"]
    assert group_names([f"l.{i}.e.{j}.w" for i in range(3) for j in range(4)]) == ["l.{0..2}.e.{0..3}.w (12)"]
    assert group_names(["l.0.e.0", "l.0.e.1", "l.1.e.1"]) == ["l.0.e.{0..1} (2)", "l.1.e.1"]
    assert group_names(["7", "8", "w13.x"]) == ["{7..8} (2)", "w13.x"]
    assert format_ranges([4, 1, 2, 9, 1]) == "1..2,4,9"
