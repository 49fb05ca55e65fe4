"""The remap table: names only, no model and no tensor; and index maps against whole-tensor references."""

import math

import pytest
import torch

from rapid_infer.errors import PluginError
from rapid_infer.loader.index_map import Chain, Section, full_slices, interleave, sliced_shape, transpose
from rapid_infer.loader.rules import Ignored, Target, experts, ignore, rename, split, stack, tie
from rapid_infer.loader.weight_map import WeightMap
from rapid_infer.testing import lint_weight_map

QKV = stack(("q_proj", "k_proj", "v_proj"), "qkv_proj", parts=("q", "k", "v"))
GATE_UP = stack(("gate_proj", "up_proj"), "gate_up_proj")
MOE = WeightMap([experts(("gate_proj", "up_proj"), "gate_up_proj"), experts("down_proj", "down_proj")])
QWEN = WeightMap([rename("language_model.model", "model", at_start=True)]) + MOE + WeightMap([QKV, GATE_UP])


def only(table: WeightMap, name: str, **known) -> Target:
    targets = table.resolve(name, **known)
    assert isinstance(targets, list), targets
    assert len(targets) == 1
    return targets[0]


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_without_rules_stays() -> None:
    table = WeightMap()
    assert only(table, "model.layers.3.mlp.up_proj.weight") == Target("model.layers.3.mlp.up_proj", "weight")
    assert only(table, "model.layers.3.A_log") == Target("model.layers.3", "A_log")
    assert only(table, "scale") == Target("", "scale")
    assert only(table, "scale").name == "scale"


@pytest.mark.parametrize(("source", "part"), [("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")])
@pytest.mark.parametrize("leaf", ["weight", "bias", "weight_scale_inv", "qweight"])
def test_stack_gives_the_part_and_keeps_the_leaf(source: str, part: str, leaf: str) -> None:
    target = only(QWEN, f"model.layers.0.self_attn.{source}.{leaf}")
    assert target == Target("model.layers.0.self_attn.qkv_proj", leaf, part)


def test_default_parts_are_positions_and_one_source_is_the_whole() -> None:
    assert only(WeightMap([GATE_UP]), "a.up_proj.weight") == Target("a.gate_up_proj", "weight", 1)
    assert only(WeightMap([stack("wo", "o_proj")]), "a.wo.weight") == Target("a.o_proj", "weight", None)
    assert only(WeightMap([stack("wo", "o_proj")]), "a.wo") == Target("a", "wo")


def test_components_are_never_matched_in_part() -> None:
    table = WeightMap([GATE_UP, rename("norm", "scale")])
    assert only(table, "mlp.gate_up_proj.weight") == Target("mlp.gate_up_proj", "weight")
    assert only(table, "mlp.my_up_proj.weight").path == "mlp.my_up_proj"
    assert only(table, "up_proj.inner.weight").path == "up_proj.inner"
    assert only(table, "q_norm.norm_weight") == Target("q_norm", "norm_weight")


def test_q_norm_is_not_taken_for_q_proj() -> None:
    assert only(QWEN, "model.layers.1.self_attn.q_norm.weight") == Target("model.layers.1.self_attn.q_norm", "weight")


def test_rename_replaces_runs_anywhere_or_at_the_start() -> None:
    anywhere = WeightMap([rename("attn.inner", "self_attn")])
    assert only(anywhere, "layers.0.attn.inner.o.weight").path == "layers.0.self_attn.o"
    assert only(anywhere, "layers.0.attn.other.weight").path == "layers.0.attn.other"
    start = WeightMap([rename("model", "backbone", at_start=True)])
    assert only(start, "model.language.model.x.weight").path == "backbone.language.model.x"
    assert only(start, "language.model.x.weight").path == "language.model.x"
    assert only(WeightMap([rename("a", "b")]), "a.a.x.a").name == "b.b.x.b"


def test_rename_to_nothing_drops_the_run() -> None:
    table = WeightMap([rename("module", "", at_start=True)])
    assert only(table, "module.lm_head.weight").name == "lm_head.weight"
    assert only(table, "module").name == "module"


def test_a_star_matches_one_component_and_carries_over() -> None:
    table = WeightMap([rename("h.*.ln_1", "layers.*.input_norm"), rename("blocks.*.*.w", "layers.*.sub.*.weight")])
    assert only(table, "h.11.ln_1.weight").name == "layers.11.input_norm.weight"
    assert only(table, "blocks.4.mlp.w").name == "layers.4.sub.mlp.weight"
    assert only(table, "h.1.2.ln_1.weight").name == "h.1.2.ln_1.weight"


def test_rules_run_in_order_and_chain() -> None:
    table = WeightMap([rename("attention", "self_attn"), rename("wq", "q_proj"), QKV])
    assert only(table, "layers.2.attention.wq.weight") == Target("layers.2.self_attn.qkv_proj", "weight", "q")
    assert only(QWEN, "language_model.model.layers.2.mlp.up_proj.weight").path == "model.layers.2.mlp.gate_up_proj"


def test_one_expert() -> None:
    path = "model.layers.5.mlp.experts"
    assert only(QWEN, f"{path}.17.gate_proj.weight") == Target(f"{path}.gate_up_proj", "weight", 0, 17)
    assert only(QWEN, f"{path}.17.up_proj.weight_scale_inv") == Target(
        f"{path}.gate_up_proj", "weight_scale_inv", 1, 17
    )
    assert only(QWEN, f"{path}.3.down_proj.weight") == Target(f"{path}.down_proj", "weight", None, 3)


def test_shared_experts_are_an_ordinary_mlp() -> None:
    target = only(QWEN, "model.layers.5.mlp.shared_experts.gate_proj.weight")
    assert target == Target("model.layers.5.mlp.shared_experts.gate_up_proj", "weight", 0)


def test_all_experts_in_one_tensor() -> None:
    path = "model.layers.5.mlp.experts"
    for leaf in ("", ".weight"):
        assert only(QWEN, f"{path}.gate_up_proj{leaf}") == Target(f"{path}.gate_up_proj", "weight")
        assert only(QWEN, f"{path}.down_proj{leaf}") == Target(f"{path}.down_proj", "weight")
    assert only(QWEN, f"{path}.up_proj") == Target(f"{path}.gate_up_proj", "weight", 1)
    assert only(QWEN, f"{path}.gate_up_proj.bias") == Target(f"{path}.gate_up_proj", "bias")


def test_experts_under_another_name_and_with_other_parts() -> None:
    table = WeightMap([experts(("w1", "w3"), "w13", parts=("gate", "up"), under="ffn.experts")])
    assert only(table, "layers.0.ffn.experts.9.w3.scale") == Target("layers.0.ffn.experts.w13", "scale", "up", 9)
    assert only(table, "layers.0.experts.9.w3.scale").path == "layers.0.experts.9.w3"


def test_other_things_among_the_experts_are_no_experts() -> None:
    assert only(QWEN, "mlp.experts.shared.up_proj.weight") == Target("mlp.experts.shared.gate_up_proj", "weight", 1)
    assert only(QWEN, "mlp.experts.bias") == Target("mlp.experts", "bias")


def test_a_piece_is_not_taken_apart_again() -> None:
    later = WeightMap([stack("gate_up_proj", "fused"), split("gate_up_proj", (("a", None), ("b", None)))])
    assert only(QWEN + later, "mlp.up_proj.weight") == Target("mlp.gate_up_proj", "weight", 1)
    assert only(MOE + later, "experts.1.up_proj.weight") == Target("experts.gate_up_proj", "weight", 1, 1)
    twice = MOE + WeightMap([experts("gate_up_proj", "fused")])
    assert only(twice, "experts.1.up_proj.weight") == Target("experts.gate_up_proj", "weight", 1, 1)


def test_index_maps_differ_between_expert_layouts() -> None:
    table = WeightMap([experts("down_proj", "down_proj", fused=transpose())])
    assert only(table, "experts.down_proj").index == transpose()
    assert only(table, "experts.1.down_proj.weight").index is None


def test_split_fills_several_parts() -> None:
    table = WeightMap([split("c_attn", into=(("qkv_proj", "q"), ("qkv_proj", "k"), ("v_proj", None)), sizes=(4, 1, 1))])
    targets = table.resolve("h.0.c_attn.bias")
    assert [(t.path, t.leaf, t.part) for t in targets] == [
        ("h.0.qkv_proj", "bias", "q"),
        ("h.0.qkv_proj", "bias", "k"),
        ("h.0.v_proj", "bias", None),
    ]
    assert [t.index.shape((12,)) for t in targets] == [(8,), (2,), (2,)]


def test_ignore_matches_whole_names() -> None:
    table = WeightMap([ignore("mtp.**", "draft"), ignore("**.rotary_emb.inv_freq", "computed"), ignore("a.*.b", "x")])
    assert table.resolve("mtp.layers.0.up_proj.weight") == Ignored("draft")
    assert table.resolve("mtp") == Ignored("draft")
    assert table.resolve("model.layers.0.rotary_emb.inv_freq") == Ignored("computed")
    assert table.resolve("rotary_emb.inv_freq") == Ignored("computed")
    assert table.resolve("a.1.b") == Ignored("x")
    assert isinstance(table.resolve("a.1.2.b"), list)
    assert isinstance(table.resolve("model.mtp.weight"), list)
    assert isinstance(table.resolve("rotary_emb.inv_freq.weight"), list)


def test_ignore_sees_names_as_earlier_rules_left_them() -> None:
    table = WeightMap([rename("a", "b"), ignore("b.**", "gone")])
    assert table.resolve("a.weight") == Ignored("gone")


def test_tie_depends_on_what_the_model_shares() -> None:
    table = WeightMap([rename("output", "lm_head", at_start=True), tie("lm_head", "model.embed_tokens")])
    assert table.resolve("output.weight", tied={"lm_head.weight"}) == Ignored("tied")
    assert only(table, "output.weight") == Target("lm_head", "weight")
    assert only(table, "output.bias", tied={"lm_head.weight"}) == Target("lm_head", "bias")
    assert [(rule.source, rule.target) for rule in table.ties] == [("lm_head", "model.embed_tokens")]


def test_tables_add_up_in_order() -> None:
    table = WeightMap([rename("a", "b")]) + WeightMap([rename("b", "c")])
    assert only(table, "a.weight").name == "c.weight"
    assert table == WeightMap([rename("a", "b"), rename("b", "c")])
    assert [row.source for row in table.rows()] == ["a", "b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: rename("", "a"),
        lambda: rename("a..b", "a"),
        lambda: rename("a.*", "*.*"),
        lambda: rename("a.**", "b"),
        lambda: stack((), "a"),
        lambda: stack(("a", "b"), "c", parts=("q",)),
        lambda: stack(("a", "b"), "c", parts=("q", "q")),
        lambda: stack(("a", "a"), "c"),
        lambda: experts(("a", "b"), "c", parts=(1, 1)),
        lambda: split("a", into=()),
        lambda: split("a", into=(("b", "q"), ("b", "q"))),
        lambda: split("a", into=(("b", "q"), ("b", "k")), sizes=(1,)),
        lambda: split("a", into=(("b", "q"), ("b", "k")), sizes=(1, 0)),
        lambda: tie("a", "a"),
        lambda: ignore("", "why"),
        lambda: WeightMap(["q_proj"]),
    ],
)
def test_malformed_rules_are_refused(make) -> None:
    with pytest.raises(PluginError):
        make()


# --- printing and lint ------------------------------------------------------------------------------------------------


def test_the_table_prints_every_rule() -> None:
    table = QWEN + WeightMap(
        [split("c_attn", (("qkv", "q"), ("qkv", "k")), index=transpose()), ignore("mtp.**", "draft")]
    )
    for word in ("experts.{E}.{gate_proj,up_proj}", "qkv_proj[q,k,v]", "transpose", "mtp.**", "draft", "at start"):
        assert word in str(table)
    assert len(str(table).splitlines()) == len(table.rules) + 1


def test_good_tables_have_no_faults() -> None:
    gpt = WeightMap([rename("h", "layers"), split("c_attn", (("qkv", "q"), ("qkv", "k")), index=transpose())])
    drafts = WeightMap([ignore("mtp.**", "draft"), tie("lm_head", "model.embed_tokens"), rename("w.*.x", "w.*.y")])
    same = WeightMap([split("gate_up_proj", (("gate_up_proj", 0), ("gate_up_proj", 1)))])
    for table in (WeightMap(), QWEN, gpt, QWEN + drafts, same):
        assert lint_weight_map(table) == []


@pytest.mark.parametrize(
    ("rules", "fault"),
    [
        ([QKV, QKV], "duplicate: rule 2"),
        ([GATE_UP, experts(("gate_proj", "up_proj"), "gate_up_proj")], "shadowed: rule 2 (experts"),
        (
            [QKV, stack(("q_proj", "o_proj"), "qo")],
            "ambiguous: rule 2 (stack {q_proj,o_proj}) never sees x.q_proj.weight",
        ),
        ([QKV, split("q_proj", (("a", None), ("b", None)))], "ambiguous: rule 2 (split q_proj)"),
        ([rename("q_proj", "a"), QKV], "never sees x.q_proj.weight, which rule 1 (rename q_proj) takes first"),
        ([rename("a", "b"), rename("a", "c")], "ambiguous: rule 2 (rename a)"),
        ([ignore("mtp.**", "draft"), rename("mtp", "model", at_start=True)], "shadowed: rule 2 (rename mtp)"),
        ([QKV, ignore("**.k_proj.k_scale", "unused")], "shadowed: rule 2 (ignore **.k_proj.k_scale)"),
        ([rename("layers", "model.layers")], "not idempotent: x.layers.weight maps to x.model.layers.weight"),
        (
            [rename("b", "c"), rename("a", "b")],
            "not idempotent: x.a.weight maps to x.b.weight, which maps to x.c.weight",
        ),
        ([ignore("*.b.weight", "no"), rename("a", "b")], "which maps to nothing"),
        ([tie("a", "b"), tie("a", "c")], "a is tied to b and to c"),
        ([tie("a", "b"), tie("b", "c")], "b, which is itself tied to c"),
    ],
)
def test_lint_finds(rules: list, fault: str) -> None:
    faults = lint_weight_map(WeightMap(rules))
    assert any(fault in text for text in faults), faults


def test_a_duplicate_is_one_fault() -> None:
    assert len(lint_weight_map(WeightMap([QKV, GATE_UP, QKV]))) == 1


@pytest.mark.parametrize("table", [QWEN, QWEN + WeightMap([rename("visual", "vision", at_start=True)])])
def test_mapped_names_map_to_themselves(table: WeightMap) -> None:
    names = [
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.7.gate_proj.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.7.down_proj.weight",
        "model.layers.0.mlp.up_proj.bias",
        "visual.blocks.0.norm.weight",
        "lm_head.weight",
    ]
    for name in names:
        target = only(table, name)
        assert only(table, target.name) == Target(target.path, target.leaf)


# --- index maps -------------------------------------------------------------------------------------------------------


def read_all_cuts(index, whole: torch.Tensor, reference: torch.Tensor) -> None:
    """Every rank's slice of every dimension, against the same slice of the piece made from the whole tensor."""
    stored = tuple(whole.shape)
    assert index.shape(stored) == tuple(reference.shape)
    for dim in range(reference.ndim):
        for ranks in (size for size in (1, 2, 3, 4) if reference.shape[dim] % size == 0):
            share = reference.shape[dim] // ranks
            for rank in range(ranks):
                cut = (slice(None),) * dim + (slice(rank * share, (rank + 1) * share),)
                fetched: list[int] = []

                def fetch(source, fetched=fetched):
                    assert len(source) == whole.ndim
                    fetched.append(whole[source].numel())
                    return whole[source]

                got = index.read(fetch, stored, full_slices(cut, tuple(reference.shape)))
                assert torch.equal(got.float(), reference[cut].float())
                assert len(fetched) == 1


def matrix(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def rotary_reference(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The permutation of the published Llama conversion script: pairs (2i, 2i + 1) to two halves."""
    rows = weight.shape[0]
    return weight.view(heads, rows // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def test_transpose_equals_the_whole() -> None:
    read_all_cuts(transpose(), matrix(6, 8), matrix(6, 8).T)
    read_all_cuts(transpose(), matrix(2, 6, 8), matrix(2, 6, 8).transpose(1, 2))
    read_all_cuts(transpose(), matrix(6), matrix(6))


def test_sections_equal_the_whole() -> None:
    whole = matrix(24, 6)
    for piece, rows in enumerate((slice(0, 12), slice(12, 20), slice(20, 24))):
        read_all_cuts(Section((3, 2, 1), piece), whole, whole[rows])
    read_all_cuts(Section((1, 1), 1, dim=1), matrix(2, 8, 3), matrix(2, 8, 3)[:, 4:])
    read_all_cuts(Section((3, 2, 1), 2), torch.tensor([7.0]), torch.tensor([7.0]))
    assert Section((3, 2, 1), 1).shape(()) == ()


def test_interleave_equals_the_whole() -> None:
    read_all_cuts(interleave(8), matrix(24, 3), rotary_reference(matrix(24, 3), heads=3))
    read_all_cuts(interleave(8), matrix(24), rotary_reference(matrix(24, 1), heads=3)[:, 0])
    whole = matrix(2, 12, 3)
    read_all_cuts(interleave(dim=1), whole, torch.cat([whole[:, 0::2], whole[:, 1::2]], 1))
    three = torch.cat([matrix(12, 2)[offset::3] for offset in range(3)])
    read_all_cuts(interleave(groups=3), matrix(12, 2), three)


def test_interleave_handles_one_byte_formats() -> None:
    whole = torch.randn(16, 4).to(torch.float8_e4m3fn)
    read_all_cuts(interleave(8), whole, rotary_reference(whole.float(), heads=2))


def test_a_rank_fetches_only_its_heads() -> None:
    whole, rows = matrix(64, 4), []

    def fetch(source):
        rows.append(source[0])
        return whole[source]

    interleave(16).read(fetch, (64, 4), (slice(32, 48), slice(0, 4)))
    assert rows == [slice(32, 48)]


def test_maps_chain() -> None:
    stored = matrix(5, 24)
    sections = Chain(transpose(), Section((1, 1, 1), 1))
    read_all_cuts(sections, stored, stored.T[8:16])
    read_all_cuts(Chain(sections, interleave(4)), stored, rotary_reference(stored.T[8:16], heads=2))


@pytest.mark.parametrize(
    ("index", "shape"), [(Section((1, 1, 1), 0), (8, 2)), (interleave(6), (8, 2)), (interleave(3, groups=2), (6, 2))]
)
def test_a_layout_that_cannot_be_is_a_value_error(index, shape) -> None:
    with pytest.raises(ValueError, match=r"cannot be cut|are not units"):
        index.shape(shape)


def test_slices_are_made_explicit() -> None:
    assert full_slices((slice(2, None),), (5, 3)) == (slice(2, 5), slice(0, 3))
    assert full_slices((slice(4, 9),), (5,)) == (slice(4, 5),)
    assert sliced_shape((slice(1, 3), 0), (5, 4, 2)) == (2, 2)
    with pytest.raises(ValueError, match="step 1"):
        full_slices((slice(None, None, 2),), (4,))
    with pytest.raises(ValueError):
        full_slices((slice(None),) * 2, (4,))
