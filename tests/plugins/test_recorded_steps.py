"""Steps by graphs, acted out on a CPU over the reference operators: the tokens of the same steps launched eagerly."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from rapid_infer import LLM, SamplingParams
from rapid_infer.ops import OPS, load_providers
from rapid_infer.outputs import RequestOutput
from rapid_infer.testing.acted_graphs import ActingRecorder
from rapid_infer.worker import model_runner

VOCAB = 97
OPTIONS: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "max_num_seqs": 4}

Pair = Callable[..., tuple[LLM, LLM]]


@pytest.fixture
def pair(open_llm) -> Pair:
    """An eager engine, and one with graphs."""
    load_providers()

    def open_both(model: Any, budget: int = 16, captured: int | None = None, **options: Any) -> tuple[LLM, LLM]:
        options = {**OPTIONS, "op_priority": {name: ["torch"] for name in OPS}, **options}
        eager, recorded = (open_llm(model, max_num_batched_tokens=budget, **options) for _ in range(2))
        runner_of(recorded).capture(captured or budget, ActingRecorder())
        return eager, recorded

    return open_both


def runner_of(llm: LLM) -> Any:
    return llm.engine.executor.runner


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(VOCAB) for _ in range(length)] for length in lengths]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    for output in outputs:
        assert output.outputs[0].error is None, output.outputs[0].error
    return [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]


def check(pair: tuple[LLM, LLM], batch: list[list[int]], params: list[SamplingParams]) -> None:
    eager, recorded = pair
    before = runner_of(recorded).graphs.replays["sample"]
    assert answers(recorded.generate(batch, params)) == answers(eager.generate(batch, params))
    assert runner_of(recorded).graphs.replays["sample"] > before
    assert runner_of(eager).graphs is None


GREEDY = {"temperature": 0, "ignore_eos": True}
SETTINGS: list[dict[str, Any]] = [
    GREEDY,
    {**GREEDY, "min_tokens": 9, "stop_token_ids": [5]},
    {**GREEDY, "min_tokens": 9, "stop_token_ids": list(range(40))},
    {**GREEDY, "logit_bias": {3: 2.0}},
    {**GREEDY, "logit_bias": {token: token % 7 - 3.0 for token in range(30)}},
    {**GREEDY, "repetition_penalty": 1.5, "frequency_penalty": 0.4},
    {**GREEDY, "allowed_token_ids": list(range(0, VOCAB, 3))},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "ignore_eos": True},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "min_tokens": 5, "stop_token_ids": list(range(60))},
]
"""A graph that one needs may be there by then from another, whose tables were narrower, or not there."""


@pytest.mark.parametrize("depth", [1, 2])
def test_settings_one_after_another_and_side_by_side(depth: int, qwen3, pair: Pair) -> None:
    both = pair(qwen3, queue_depth=depth)
    params = [SamplingParams(**one, seed=n, max_tokens=12) for n, one in enumerate(SETTINGS)]
    for one, prompt in zip(params, prompts([7] * len(params))):
        check(both, [prompt], [one])
    check(both, prompts([1, 5, 9, 30, 3, 17, 2, 26, 11], seed=1), params)


@pytest.mark.parametrize("name", ["qwen3", "windowed", "mla"])
@pytest.mark.parametrize(("depth", "budget"), [(1, 16), (2, 16), (1, 48), (2, 48)])
def test_rows_that_come_and_go(name: str, depth: int, budget: int, pair: Pair, request: pytest.FixtureRequest) -> None:
    """Prompts in chunks beside answers, in fewer rows than there are, so that each slot of the ring has held all.

    With the larger budget there are graphs of several sizes, recorded while rows run.
    """
    both = pair(request.getfixturevalue(name), budget, queue_depth=depth)
    batch = prompts([3, 40, 1, 21, 16, 70, 8, 1, 5], seed=2)
    params = [SamplingParams(**GREEDY, max_tokens=4 + 5 * (n % 4)) for n in range(len(batch))]
    check(both, batch, params)
    # All are cached but for what a block does not hold.
    check(both, batch[::-1], params[::-1])


def test_log_probabilities(qwen3, pair: Pair) -> None:
    eager, recorded = pair(qwen3)
    batch, params = prompts([5, 20, 3]), SamplingParams(**GREEDY, max_tokens=6, logprobs=3)
    for want, got in zip(*(llm.generate(batch, params) for llm in (eager, recorded))):
        for one, other in zip(want.outputs[0].logprobs, got.outputs[0].logprobs):
            assert list(one) == list(other)
            assert [value.logprob for value in other.values()] == pytest.approx(
                [value.logprob for value in one.values()], abs=1e-4
            )


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_no_graph_takes_between_recorded_ones(
    depth: int, mla, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger than any graph, and with prompt log-probabilities; both kinds of steps share the ring and the table."""
    eager, recorded = pair(mla, 48, captured=16, queue_depth=depth)
    ran = {"forward": 0}
    forward = runner_of(recorded).program.forward

    def counted(*args: Any) -> Any:
        ran["forward"] += 1
        return forward(*args)

    monkeypatch.setattr(runner_of(recorded).program, "forward", counted)
    batch = prompts([3, 60, 11, 7, 30], seed=4)
    params = [SamplingParams(**GREEDY, max_tokens=9, prompt_logprobs=2 if n % 2 else None) for n in range(len(batch))]
    wanted, found = (llm.generate(batch, params) for llm in (eager, recorded))
    assert answers(found) == answers(wanted)
    for want, got in zip(wanted, found):
        for one, other in zip(want.prompt_logprobs or (), got.prompt_logprobs or (), strict=True):
            assert (one is None) == (other is None)
            for token, value in (one or {}).items():
                assert value.logprob == pytest.approx(other[token].logprob, abs=1e-4)
    assert ran["forward"] >= 3
    assert runner_of(recorded).graphs.replays["forward"] >= 9


def test_recording_moves_no_row(qwen3, open_llm) -> None:
    """Entries of earlier steps lie in the ring, as that of the step that measured memory does."""
    load_providers()
    llm = open_llm(qwen3, max_num_batched_tokens=16, **OPTIONS, op_priority={name: ["torch"] for name in OPS})
    llm.generate(prompts([20, 5, 9, 4]), SamplingParams(**GREEDY, max_tokens=5))
    runner = runner_of(llm)
    tables = [runner.device_rows.last_token, runner.device_rows.length, runner.device_rows.block_tables]
    before = [tensor.clone() for tensor in tables]
    runner.capture(16, ActingRecorder())
    for tensor, value in zip(tables, before):
        assert tensor.equal(value)


def test_more_block_updates_than_an_entry_has_room_for(windowed, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "UPDATES_PER_ROW", 0)
    both = pair(windowed)
    room = runner_of(both[1]).ring.layout.max_updates
    sizes: list[int] = []
    launch = runner_of(both[1]).launch

    def noted(plan: Any) -> Any:
        if plan.new_rows is None and plan.max_query_len > 1:
            sizes.append(sum(len(group.rows) for group in plan.new_blocks))
        return launch(plan)

    monkeypatch.setattr(runner_of(both[1]), "launch", noted)
    batch = prompts([4, 4, 4, 50])
    check(both, batch, [SamplingParams(**GREEDY, max_tokens=20)] * 4)
    assert max(sizes) > room


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_stopped_half_way_leaves_the_next_ones_as_they_are(
    depth: int, qwen3, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, recorded = pair(qwen3, queue_depth=depth)
    graphs, (prompt, *batch) = runner_of(recorded).graphs, prompts([6, 6, 21, 3], seed=3)
    sample, calls = graphs.launch_sample, 0

    def fails_once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of luck")
        return sample(*args)

    monkeypatch.setattr(graphs, "launch_sample", fails_once)
    greedy = SamplingParams(**GREEDY, max_tokens=12)
    [failed] = recorded.generate([prompt], greedy)
    assert failed.outputs[0].finish_reason == "error"
    assert "out of luck" in (failed.outputs[0].error or "")
    check((eager, recorded), batch, [greedy] * 3)


def test_ways_to_sample_are_recorded_after_all_forwards(open_llm, qwen3) -> None:
    load_providers()
    order: list[str] = []

    class Noting(ActingRecorder):
        def record(self, what: str, *args: Any, **kwargs: Any) -> Any:
            order.append(what)
            return super().record(what, *args, **kwargs)

    llm = open_llm(qwen3, max_num_batched_tokens=16, op_priority={name: ["torch"] for name in OPS}, **OPTIONS)
    runner_of(llm).capture(16, Noting())
    kinds = ["sample" if what.startswith("sampling") else what.rsplit(maxsplit=1)[1] for what in order]
    assert [kind for kind, _ in groupby(kinds)] == ["tokens", "rows", "sample"]


class Rehearsed(nn.Module):
    """Says nothing of it from outside, but must run before each recording; `broken`: can have none."""

    def __init__(self, inner: nn.Module, broken: bool) -> None:
        super().__init__()
        self.inner, self.state = inner, [broken, False]
        self.drops_tokens = inner.drops_tokens

    def forward(self, *args: Any) -> Any:
        recording = isinstance(_get_current_dispatch_mode(), TorchDispatchMode)
        if recording and not self.state[1]:
            raise ValueError("compiled while recording")
        if recording and self.state[0]:
            raise ValueError("reads a value")
        self.state[1] = not recording
        return self.inner(*args)


def hide(llm: LLM, *broken: bool) -> Any:
    """Layers of one kind, as far as the stack can see."""
    layers = runner_of(llm).model.layers
    for name, fails in enumerate(broken):
        setattr(layers, str(name), Rehearsed(layers.get_submodule(str(name)), fails))
    return runner_of(llm)


class Counting(ActingRecorder):
    def __init__(self) -> None:
        self.count = 0

    def record(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().record(*args, **kwargs)


def test_a_model_that_hides_how_its_layers_differ_is_warmed_up_with_all(tiny, open_llm, caplog) -> None:
    load_providers()
    options = {**OPTIONS, "max_num_batched_tokens": 16, "op_priority": {name: ["torch"] for name in OPS}}
    model = tiny("qwen3", {"head_dim": 32, "num_hidden_layers": 4})
    eager, hiding = open_llm(model, **options), open_llm(model, **options)
    recorder = Counting()
    hide(hiding, False, False, False).capture(16, recorder)
    assert "compiled while recording" in caplog.text
    graphs = runner_of(hiding).graphs
    assert recorder.count == sum(graphs.recorded.values()) + 1
    check((eager, hiding), prompts([7, 3]), [SamplingParams(**GREEDY, max_tokens=6)] * 2)

    failing, recorder = open_llm(model, **options), Counting()
    with pytest.raises(RuntimeError) as error:
        hide(failing, False, True, False).capture(16, recorder)
    assert recorder.count == 2
    assert str(error.value) == (
        "recording the CUDA graph for the forward of 16 tokens failed with ValueError: compiled while recording; "
        "enforce_eager=True runs without graphs; once all layers had run it failed with ValueError: reads a value"
    )
    assert str(error.value.__cause__.__cause__) == "compiled while recording"


def test_a_recording_whose_layers_all_ran_before_is_not_tried_again(qwen3, open_llm) -> None:
    load_providers()
    llm = open_llm(qwen3, max_num_batched_tokens=16, **OPTIONS, op_priority={name: ["torch"] for name in OPS})
    recorder = Counting()
    with pytest.raises(RuntimeError, match="failed with ValueError: reads a value; enforce_eager=True"):
        hide(llm, True, True).capture(16, recorder)
    assert recorder.count == 1
    assert runner_of(llm).graphs is None
    llm.generate(prompts([5]), SamplingParams(**GREEDY, max_tokens=3))
