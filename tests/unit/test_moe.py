"""Mixtures of experts against a loop over tokens, cut over ranks; padding tokens; and routers by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rapid_infer.errors import ConfigError
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.moe import Experts, MoE, RouterConfig
from rapid_infer.layers.parameter import placement_of
from rapid_infer.ops import OpResolver, route_experts
from rapid_infer.parallel import ParallelState
from rapid_infer.testing.simulated_ranks import run_ranks

EXPERTS, HIDDEN, SIZE, SHARED = 6, 8, 12, 16
ROUTER = RouterConfig(EXPERTS, 2)


def context(parallel: ParallelState | None = None) -> BuildContext:
    return BuildContext(torch.float32, OpResolver("cpu"), 64, parallel or ParallelState(), name="mlp")


@dataclass
class Weights:
    gate: Tensor
    up_and_gate: list[tuple[Tensor, Tensor, Tensor]]
    shared: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def make(cls) -> Weights:
        torch.manual_seed(0)

        def mlp(size: int) -> tuple[Tensor, Tensor, Tensor]:
            return torch.randn(size, HIDDEN), torch.randn(size, HIDDEN), torch.randn(HIDDEN, size)

        return cls(torch.randn(EXPERTS, HIDDEN), [mlp(SIZE) for _ in range(EXPERTS)], mlp(SHARED))


def put(module: torch.nn.Module, part: int | None, expert: int | None, tensor: Tensor) -> None:
    place = placement_of(module, "weight", part, expert)
    if place is not None:
        assert place.shape == tuple(tensor.shape)
        place.param.data[place.target] = tensor[place.source]


def fill(experts: Experts, weights: Weights, fused: bool = False) -> None:
    gates, ups, downs = zip(*weights.up_and_gate)
    if fused:
        put(experts.gate_up_proj, 0, None, torch.stack(gates))
        put(experts.gate_up_proj, 1, None, torch.stack(ups))
        put(experts.down_proj, None, None, torch.stack(downs))
        return
    for expert in range(EXPERTS):
        put(experts.gate_up_proj, 0, expert, gates[expert])
        put(experts.gate_up_proj, 1, expert, ups[expert])
        put(experts.down_proj, None, expert, downs[expert])


def build(weights: Weights, router: RouterConfig, parallel: ParallelState, fused: bool = False) -> MoE:
    layer = MoE(context(parallel), HIDDEN, SIZE, router, SHARED)
    for param in layer.parameters():
        param.data.fill_(torch.nan)
    layer.gate.weight.data.copy_(weights.gate)
    fill(layer.experts, weights, fused)
    assert layer.shared_experts is not None
    put(layer.shared_experts.gate_up_proj, 0, None, weights.shared[0])
    put(layer.shared_experts.gate_up_proj, 1, None, weights.shared[1])
    put(layer.shared_experts.down_proj, None, None, weights.shared[2])
    assert not any(param.isnan().any() for param in layer.parameters())
    return layer


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def expected(weights: Weights, router: RouterConfig, x: Tensor) -> Tensor:
    rows = []
    for token in x:
        scores = (weights.gate @ token).softmax(0)
        best = sorted(range(EXPERTS), key=lambda e, scores=scores: -float(scores[e]))[: router.top_k]
        total = sum(float(scores[e]) for e in best) if router.renormalize else 1.0
        routed = sum((scores[e] * mlp(token, *weights.up_and_gate[e]) for e in best), torch.zeros(HIDDEN))
        rows.append(routed * router.scale / total + mlp(token, *weights.shared))
    return torch.stack(rows)


def batch(tokens: int, token_mask: Tensor | None = None) -> ForwardBatch:
    ids = torch.arange(tokens)
    return ForwardBatch(ids, ids, [], token_mask=token_mask)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("router", [ROUTER, replace(ROUTER, renormalize=False, scale=2.5), replace(ROUTER, top_k=1)])
def test_a_layer_over_ranks_equals_a_loop_over_tokens(router: RouterConfig, tp: int, ep: int, fused: bool) -> None:
    weights, x = Weights.make(), torch.randn(9, HIDDEN)

    def run(parallel: ParallelState) -> Tensor:
        result = build(weights, router, parallel, fused)(x, batch(9))
        # Routed and shared parts together: one reduction.
        assert tp == 1 or parallel.comm.sums == 1
        return result

    for result in run_ranks(tp, run, ep_size=ep):
        torch.testing.assert_close(result, expected(weights, router, x), atol=1e-4, rtol=1e-4)


def test_padding_tokens_get_no_expert() -> None:
    layer, x = build(Weights.make(), ROUTER, ParallelState()), torch.randn(4, HIDDEN)
    token_mask = torch.tensor([7, 0, 1, 0], dtype=torch.int32)
    weights, slots = layer.gate(x, token_mask)
    assert (slots[[1, 3]] == -1).all()
    assert (slots[[0, 2]] >= 0).all()
    assert not weights[[1, 3]].any()
    full = layer(x, batch(4))
    padded = layer(x.where(token_mask[:, None] > 0, torch.nan), batch(4, token_mask))
    torch.testing.assert_close(padded[[0, 2]], full[[0, 2]])


@pytest.mark.parametrize("wanted", [[2], [0, 3], [2, 2, 3]])
def test_the_last_layer_knows_which_of_the_tokens_it_kept_are_padding(wanted: list[int]) -> None:
    layer, x = build(Weights.make(), ROUTER, ParallelState()), torch.randn(4, HIDDEN)
    token_mask, index = torch.tensor([7, 0, 1, 0], dtype=torch.int32), torch.tensor(wanted)
    last = replace(batch(4, token_mask), logits_indices=index, last_layer_indices=index)
    torch.testing.assert_close(layer(x[index], last), layer(x, batch(4, token_mask))[index])


def test_experts_are_shared_out_with_one_more_for_the_first_ranks() -> None:
    maps = [ParallelState(rank, 8, ep_size=4).expert_map(6) for rank in range(8)]
    assert maps[0] == maps[1] == (0, 1, -1, -1, -1, -1)
    assert maps[2] == maps[3] == (-1, -1, 0, 1, -1, -1)
    assert maps[7] == (-1, -1, -1, -1, -1, 0)
    with pytest.raises(ConfigError, match="num_experts=6 leaves a rank without experts"):
        ParallelState(0, 8, ep_size=8).expert_map(6)
    with pytest.raises(ConfigError, match=r"expert_parallel_size=3 does not divide .*=8; use one of \[1, 2, 4, 8\]"):
        ParallelState(0, 8, ep_size=3)


def test_experts_out_of_order_load_one_by_one_but_not_from_one_tensor() -> None:
    weights = Weights.make()
    experts = Experts(context().sub("experts"), HIDDEN, SIZE, [5, 4, 3, 2, 1, 0])
    fill(experts, weights)
    torch.testing.assert_close(experts.down_proj.weight[5], weights.up_and_gate[0][2])
    with pytest.raises(KeyError):
        fill(experts, weights, fused=True)


def route(scores: list[float], config: RouterConfig, bias: list[float] | None = None) -> dict[int, float]:
    """Expert to weight, for a token with these probabilities (softmax) or sigmoids."""
    given = torch.tensor([scores])
    logits = given.log() if config.scoring == "softmax" else given.logit()
    weights, slots = route_experts(
        logits,
        None if bias is None else torch.tensor(bias),
        None,
        torch.arange(len(scores)).int(),
        config.top_k,
        config.groups,
        config.top_groups,
        config.scoring,
        config.renormalize,
        config.scale,
    )
    return dict(zip(slots[0].tolist(), [round(w, 5) for w in weights[0].tolist()]))


def test_routers_by_hand() -> None:
    softmax = [0.30, 0.02, 0.10, 0.20, 0.25, 0.13]
    assert route(softmax, RouterConfig(6, 2, renormalize=False)) == {0: 0.3, 4: 0.25}
    assert route(softmax, RouterConfig(6, 2)) == {0: 0.54545, 4: 0.45455}
    # Groups (0, 1), (2, 3), (4, 5) are worth 0.3, 0.2 and 0.25.
    limited = RouterConfig(6, 3, groups=3, top_groups=2, renormalize=False, scale=16.0)
    assert route(softmax, limited) == {0: 4.8, 4: 4.0, 5: 2.08}
    sigmoid = RouterConfig(6, 2, "sigmoid", 3, 1, True, 2.5, True)
    values = [0.9, 0.1, 0.6, 0.5, 0.2, 0.3]
    # Two best: 1.0, 1.1, 0.5: the group with the best expert is out.
    assert route(values, sigmoid, [0.0] * 6) == {2: 1.36364, 3: 1.13636}
    # Biases choose, and all below zero must still beat what is out; weights come from the scores themselves.
    assert route(values, sigmoid, [-3.0, -3.0, -3.0, -3.0, -1.0, -1.0]) == {5: 1.5, 4: 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring": "tanh"}, "'tanh'; expected one of softmax, sigmoid"),
        ({"groups": 4}, "6 experts cannot be routed in 4 equal groups"),
        ({"groups": 3, "top_groups": 4}, "of which 4 are kept"),
        ({"groups": 3, "top_groups": 1, "top_k": 3}, "3 experts a token, but 1 groups of 2"),
        ({"groups": 6, "top_groups": 6, "correction_bias": True}, "two best experts, and has one"),
    ],
)
def test_what_cannot_be_routed_is_a_config_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(ROUTER, **options)  # type: ignore[arg-type]
