"""What a replayed decode step does and does not do: the same bits as eager code, two launches, no wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gpu_traffic import MLA, PROFILES, graphs_of, params, prompts, replays, tokens, traffic

from rapid_infer import LLM
from rapid_infer.worker.graph_recorder import GraphRecorder
from rapid_infer.worker.graph_runner import DECODE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAITS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "cudaStreamSynchronize", "cuStreamSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperative", "cuLaunchCooperative")
MEMORY = ("cudaMemcpy", "cuMemcpy", "cudaMemset", "cuMemset", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMem")
GRAPH = ("cudaGraphLaunch", "cuGraphLaunch")


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("qwen3")


@pytest.mark.parametrize(("name", "dtype"), [("qwen3", "bfloat16"), ("qwen3", "float32"), ("mla", "bfloat16")])
def test_replays_give_the_bits_of_the_same_code_run_eagerly(name, dtype, tiny, open_llm, monkeypatch):
    """After each replayed step, its state is put back and the step runs again without the graphs."""
    code: dict[Any, Callable[[], Any]] = {}
    record = GraphRecorder.record

    def keep(self, what, run, *more):
        graph, result = record(self, what, run, *more)
        code[graph] = run
        return graph, result

    monkeypatch.setattr(GraphRecorder, "record", keep)
    # Its own engine, by an option that nobody else sets, since its graphs must be recorded here.
    llm = open_llm(tiny(*MLA) if name == "mla" else tiny(name), dtype=dtype, queue_depth=1, seed=1)
    graphs, runner = graphs_of(llm), llm.engine.executor.runner
    device_rows, launch, launch_forward = runner.device_rows, runner.launch, graphs.launch_forward
    steps: Counter[tuple[str, str, int]] = Counter()
    different: list[str] = []
    state: list[torch.Tensor] = []
    before: list[torch.Tensor] = []

    def note_state(key):
        """When new rows have been written to the device."""
        counts = device_rows.tokens.output_counts
        state[:] = [device_rows.last_token, device_rows.length, runner.ring.step, *([] if counts is None else [counts])]
        before[:] = [tensor.clone() for tensor in state]
        launch_forward(key)

    @torch.inference_mode()
    def launch_twice(plan):
        handle = launch(plan)
        torch.cuda.synchronize()
        after = [tensor.clone() for tensor in state]
        n = len(plan.sampled)
        kind, size, rows = handle.key
        forward, sampled = graphs._forward[kind, size]
        sample, logprobs = graphs._sample[graphs._sample_key(kind, rows, plan.features)]
        results = runner.ring.results[handle.slot, :n]
        replayed = [sampled.hidden[:n].clone(), sampled.lengths[:n].clone(), results.clone()]
        scores = [] if logprobs is None else [tensor[:n].clone() for tensor in logprobs]
        for tensor, value in zip(state, before):
            tensor.copy_(value)
        results.fill_(-7)
        again = code[forward]()
        found = code[sample]()
        torch.cuda.synchronize()
        hidden = again.hidden
        eager = [hidden[:n], again.lengths[:n], results]
        names = ["hidden states", "lengths", "tokens", "last tokens", "table lengths", "step", "counts"]
        pairs = [*zip(replayed, eager), *zip(after, state), *zip(scores, [tensor[:n] for tensor in found or ()])]
        names[len(replayed) + len(state) :] = ["log-probability ids", "values", "ranks"]
        for what, (a, b) in zip(names, pairs):
            if not torch.equal(a, b):
                different.append(f"{what} of {n} rows, step {steps.total()}, {plan.features}")
        if bool(hidden[:n].float().abs().sum() == 0) or bool((results < 0).any()):
            different.append(f"nothing computed for {n} rows")
        steps[profile, kind, size] += 1
        return handle

    monkeypatch.setattr(graphs, "launch_forward", note_state)
    monkeypatch.setattr(runner, "launch", launch_twice)
    for profile in PROFILES:
        for logprobs in (None, 5) if profile == "everything" else (None,):
            for n in (1, 2, 3, 7, 13):
                # Some of these rows cross the end of a block within their 8 tokens.
                batch = prompts([12 + 5 * i for i in range(n)], seed=n)
                llm.generate(batch, [params(profile, i, max_tokens=8, logprobs=logprobs) for i in range(n)])
    assert not different, different[:10]
    # Of the 8 tokens a request may stop early, the first comes from the prompt's own step.
    assert {size for _, kind, size in steps if kind == DECODE} == {1, 2, 4, 8, 16}
    assert all(steps[profile, DECODE, size] > 0 for profile in PROFILES for size in (1, 2, 4, 8, 16))
    assert len({size for _, kind, size in steps if kind != DECODE}) > 3


def calls_of(run: Callable[[], Any]) -> Counter[str]:
    """How often `run` called what: operators and the CUDA API, as the host saw it."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
    return Counter(event.name for event in recorded.events())


def count(calls: Counter[str], names: tuple[str, ...]) -> dict[str, int]:
    return {name: n for name, n in calls.items() if name.startswith(names)}


@contextmanager
def decoding(llm: LLM, profile: str) -> Iterator[None]:
    """Five rows that have all begun to decode, with hundreds of tokens to go; a row count that is no bucket's."""
    engine = llm.engine
    names = [f"{profile} {n}" for n in range(5)]
    for n, prompt in enumerate(prompts([3, 17, 29, 40, 55], seed=3)):
        engine.add_request(names[n], prompt, params(profile, n, max_tokens=300, stop_token_ids=()))
    try:
        for _ in range(8):
            engine.step()
        assert len(engine.core.scheduler.running) == 5
        yield
        assert len(engine.core.scheduler.running) == 5
    finally:
        engine.discard(names)
        while engine.core.has_unfinished_requests():
            engine.step()


@pytest.mark.parametrize(
    ("block_size", "profile", "depth"),
    [(16, "greedy", 2), (16, "sampled", 2), (16, "everything", 2), (64, "greedy", 2), (16, "greedy", 1)],
)
def test_a_steady_step_is_two_launches_and_nothing_else(block_size, profile, depth, model, open_llm):
    llm = open_llm(model, dtype="bfloat16", block_size=block_size, queue_depth=depth)
    core, steps = llm.engine.core, 70
    with decoding(llm, profile):
        free, before = core.cache.num_free, replays(llm)
        calls = calls_of(lambda: [llm.engine.step() for _ in range(steps)])
        # Every row has crossed the end of a block.
        assert free - core.cache.num_free >= 5 * (steps // block_size)
        assert replays(llm) - before == steps
        assert sum(count(calls, GRAPH).values()) == 2 * steps, calls
        unwanted = count(calls, (*LAUNCHES, *MEMORY, *WAITS))
        assert not unwanted, (unwanted, calls)
        assert not {name: n for name, n in calls.items() if name.startswith("aten::")}, calls


def test_eager_engines_launch_no_graph(model, open_llm):
    llm = open_llm(model, dtype="bfloat16", enforce_eager=True)
    assert graphs_of(llm) is None
    with decoding(llm, "greedy"):
        calls = calls_of(lambda: [llm.engine.step() for _ in range(3)])
        assert not {name for name in calls if "Graph" in name}, calls
        # What the test above looks for, the profiler sees here.
        assert sum(count(calls, LAUNCHES).values()) >= 3 * 10, calls


def test_each_step_counts_one_replay_of_each_graph(model, open_llm):
    llm = open_llm(model, dtype="bfloat16")
    with decoding(llm, "greedy"):
        before = replays(llm)
        for _ in range(10):
            llm.engine.step()
        assert replays(llm) - before == 10


def test_nothing_waits_for_the_device_but_the_collector(model, open_llm):
    """In a whole serving loop: requests join, run over the ends of blocks, and leave, with all settings."""
    llm = open_llm(model, dtype="bfloat16")
    recorded = None
    for again in (False, False, True):
        # The first time makes tables that some graphs depend on; the third time nothing is new.
        llm.reset_prefix_cache()
        if again:
            recorded = graphs_of(llm).recorded
            torch.cuda.set_sync_debug_mode("error")
        try:
            before = replays(llm)
            if again:
                with pytest.raises(RuntimeError, match="synchroniz"):
                    torch.ones(1, device="cuda").item()
            ended = traffic(llm, seed=7, steps=400)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert ended["length"] > 20
        assert replays(llm) - before > 200
    assert graphs_of(llm).recorded == recorded


FAILING = """
import json, sys, torch
from rapid_infer import LLM, SamplingParams

path, options = sys.argv[1], json.loads(sys.argv[2])
greedy = SamplingParams(temperature=0, max_tokens=4)
with LLM(path, **options, enforce_eager=True) as llm:
    cls = type(llm.engine.executor.runner.model)
    forward = cls.forward

    def reads_a_value(self, batch):
        hidden = forward(self, batch)
        if torch.cuda.is_current_stream_capturing():
            hidden.sum().item()
        return hidden

    cls.forward = reads_a_value
    tokens = llm.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids
try:
    LLM(path, **options)
except Exception as error:
    print(json.dumps([type(error).__name__, str(error), len(tokens)]))
"""


def test_a_recording_that_fails_names_the_graph_and_the_way_out(model):
    """In a process of its own, since a recording that broke off may leave the device's allocator in a bad state."""
    options = {"device": "cuda", "skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    command = [sys.executable, "-c", FAILING, str(model.path), json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.stdout.strip(), done.stderr[-3000:]
    kind, message, eager_tokens = json.loads(done.stdout.splitlines()[-1])
    assert eager_tokens == 4
    assert kind == "RuntimeError"
    assert "CUDA graph for the forward of 64 tokens" in message
    assert "enforce_eager=True" in message


def test_engines_side_by_side_keep_their_graphs_apart(model, open_llm):
    """Two engines of one process, one step of each in turn."""
    first, second = (open_llm(model, dtype="bfloat16", queue_depth=depth) for depth in (1, 2))
    batch = prompts([9, 30, 50], seed=8)
    greedy = [params("greedy", max_tokens=20)] * 3
    alone = [tokens(llm.generate(batch, greedy)) for llm in (first, second)]
    streams = [llm.stream(prompt, greedy[0]) for prompt in batch for llm in (first, second)]
    got: list[list[int]] = [[] for _ in streams]
    for llm in (first, second):
        llm.reset_prefix_cache()
    live = True
    while live:
        live = False
        for found, stream in zip(got, streams):
            output = next(stream, None)
            if output is not None:
                live = True
                found += output.outputs[0].token_ids
    assert [got[0::2], got[1::2]] == alone
