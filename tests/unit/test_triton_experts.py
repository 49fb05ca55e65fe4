"""Triton's experts beyond the generic test: how choices are sorted, every tile size, and what nobody may read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rapid_infer.ops import OPS
from rapid_infer.ops.providers.triton.experts import fused_experts as module
from rapid_infer.ops.providers.triton.experts import plan as plan_module
from rapid_infer.ops.providers.triton.experts.fused_experts import Tile, choices_per_tile, fused_experts
from rapid_infer.ops.providers.triton.experts.plan import experts_plan, most_tiles
from rapid_infer.ops.providers.triton.experts.router import route_experts
from rapid_infer.ops.providers.triton.launch import has_tma

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REFERENCE = OPS["fused_experts"].reference


_empty = torch.empty


def poisoned(*shape: int, **options: object) -> Tensor:
    """`torch.empty`, and whatever memory may hold."""
    made = _empty(*shape, **options)  # type: ignore[call-overload]
    return made.fill_(math.nan if made.is_floating_point() else 1 << 20)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def choose(tokens: int, top_k: int, experts: int, absent: float = 0.2) -> Tensor:
    """Distinct experts for each token, some replaced by none."""
    slots = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int()
    slots[torch.rand(tokens, top_k) < absent] = -1
    return slots.to(DEVICE)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(1, 1, 1), (2, 3, 5), (7, 2, 40), (30, 6, 8), (20, 3, 24), (50, 1, 3)]
)
@pytest.mark.parametrize("tile", [1, 4, 16])
@pytest.mark.parametrize("at_once", [8, 1024])
def test_choices_are_sorted_and_every_one_is_in_one_tile_of_its_expert(
    tokens: int, top_k: int, experts: int, tile: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "CHOICES_AT_ONCE", at_once)
    monkeypatch.setattr(plan_module, "TILES_AT_ONCE", 4)
    slots = choose(tokens, top_k, experts)
    plan = experts_plan(slots, experts, tile)
    assert plan.tiles == most_tiles(tokens * top_k, experts, tile) == len(plan.expert)
    flat = slots.flatten().tolist()
    seen: list[int] = []
    for expert, first, last in zip(plan.expert.tolist(), plan.first.tolist(), plan.last.tolist()):
        if expert < 0:
            continue
        assert first < last <= first + tile
        mine = plan.order[first:last].tolist()
        assert {flat[choice] for choice in mine} == {expert}
        seen += mine
    # Expert after expert, and an expert's choices in the order of tokens: sums never depend on luck.
    assert seen == sorted((c for c in range(len(flat)) if flat[c] >= 0), key=lambda c: (flat[c], c))


def test_tiles_grow_with_an_experts_share() -> None:
    assert [choices_per_tile(n, 64) for n in (6, 1024, 1025, 4096, 4097, 49152)] == [16, 16, 32, 64, 128, 128]


def expert_inputs(tokens: int, experts: int, hidden: int, size: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(tokens, hidden, device=DEVICE),
        "gate_up": torch.randn(experts, 2 * size, hidden, device=DEVICE) / hidden**0.5,
        "down": torch.randn(experts, hidden, size, device=DEVICE) / size**0.5,
        "weights": torch.rand(tokens, 2, device=DEVICE),
        "slots": choose(tokens, 2, experts),
        "shared": torch.randn(tokens, hidden, device=DEVICE),
    }


def halved(args: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.half() if name not in ("weights", "slots") else t for name, t in args.items()}


@pytest.mark.parametrize("per_tile", [16, 32, 64, 128])
@pytest.mark.parametrize(("hidden", "size"), [(32, 32), (40, 56)])
def test_every_tile_size_gives_the_same(per_tile: int, hidden: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, experts = 70, 3
    monkeypatch.setattr(module, "choices_per_tile", lambda choices, experts: per_tile)
    monkeypatch.setitem(module.TILES, per_tile, Tile((16, 32), (32, 16), 4, 2))
    args = expert_inputs(tokens, experts, hidden, size)
    torch.testing.assert_close(fused_experts(**halved(args)).float(), REFERENCE(**args), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "size", "up", "down"),
    [
        (70, 3, 32, 32, (16, 32), (32, 16)),
        (90, 9, 40, 56, (32, 32), (16, 32)),
        (150, 2, 24, 88, (64, 16), (16, 64)),
    ],
)
def test_tma_copies_the_same_weights(
    tokens: int,
    experts: int,
    hidden: int,
    size: int,
    up: tuple[int, int],
    down: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that reach beyond an expert, tiles that are not full, an expert that nobody chose, and NaN behind all."""
    monkeypatch.setattr(module, "choices_per_tile", lambda choices, experts: 64)
    monkeypatch.setitem(module.TILES, 64, Tile(up, down, 4, 2, tma=True))
    monkeypatch.setattr(module, "gate_up_kernel", None)
    args = expert_inputs(tokens, experts, hidden, size)
    args["slots"][args["slots"] == experts - 1] = -1
    half = halved(args)
    # What follows a token's inputs must not be multiplied, not even by zero.
    half["x"] = torch.full((tokens, hidden + 64), math.nan, dtype=torch.half, device=DEVICE)[:, :hidden].copy_(
        args["x"]
    )
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", poisoned)
        got = fused_experts(**half)
    torch.testing.assert_close(got.float(), REFERENCE(**args), atol=2e-2, rtol=2e-2)


def test_tma_takes_what_lies_at_multiples_of_16_bytes_and_threads_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile((16, 32), (16, 32), 4, 2, tma=True)
    monkeypatch.setitem(module.TILES, 16, tile)
    monkeypatch.setattr(module, "ALONE", tile)
    monkeypatch.setattr(module, "gate_up_tma_kernel", None)
    some, alone, odd = expert_inputs(7, 3, 32, 32), expert_inputs(1, 3, 32, 32), expert_inputs(7, 3, 32, 36)
    assert module.can_copy(some["gate_up"].half(), some["down"].half()) == has_tma(torch.device(DEVICE))
    assert not module.can_copy(some["gate_up"], some["down"])
    beside = halved(some)
    beside["down"] = torch.cat([beside["down"].flatten()[:1], beside["down"].flatten()])[1:].view(3, 32, 32)
    for args, half in ((some, beside), (alone, halved(alone)), (odd, halved(odd))):
        torch.testing.assert_close(fused_experts(**half).float(), REFERENCE(**args), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("tokens", [1, 6])
def test_no_expert_adds_nothing_whatever_memory_holds(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, shared = torch.randn(tokens, 16, device=DEVICE), torch.randn(tokens, 16, device=DEVICE)
    gate_up, down = torch.randn(4, 64, 16, device=DEVICE), torch.randn(4, 16, 32, device=DEVICE)
    slots, weights = choose(tokens, 3, 4, absent=0.5), torch.rand(tokens, 3, device=DEVICE)
    slots[0] = -1
    x[0] = math.nan
    expected = REFERENCE(x, gate_up, down, weights, slots, shared)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", poisoned)
        got = fused_experts(x, gate_up, down, weights, slots, shared)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[0], shared[0])


def test_nan_scores_give_no_expert() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3], [math.nan] * 4], device=DEVICE)
    expert_map = torch.arange(4, dtype=torch.int32, device=DEVICE)
    for scoring in ("softmax", "sigmoid"):
        weights, places = route_experts(logits, None, None, expert_map, 2, 1, 1, scoring, True, 1.0)
        assert places.tolist() == [[1, 3], [-1, -1]]
        assert weights[1].tolist() == [0.0, 0.0]
    logits[1, 2] = 0.1
    weights, places = route_experts(logits, None, None, expert_map, 2, 1, 1, "sigmoid", True, 1.0)
    assert places[1].tolist() == [2, -1]
    assert weights[1].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("groups", [1, 5])
def test_choices_below_zero_and_groups_that_fill_no_power_of_two(groups: int) -> None:
    """More than are left are not asked for: 3 groups of 4 experts give 12."""
    logits, bias = torch.randn(9, 20, device=DEVICE), torch.randn(20, device=DEVICE) - 1
    expert_map = torch.randperm(20).int().to(DEVICE) - 2
    arguments = (logits, bias, None, expert_map, 12, groups, min(groups, 3), "sigmoid", True, 2.5)
    for got, expected in zip(route_experts(*arguments), OPS["route_experts"].reference(*arguments)):
        torch.testing.assert_close(got, expected)


def test_equal_scores_go_to_the_lower_number() -> None:
    expert_map = torch.arange(6, dtype=torch.int32, device=DEVICE)
    bias = torch.zeros(6, device=DEVICE)
    places = route_experts(torch.zeros(1, 6, device=DEVICE), bias, None, expert_map, 3, 3, 2, "sigmoid", True, 1.0)[1]
    assert places.tolist() == [[0, 1, 2]]
