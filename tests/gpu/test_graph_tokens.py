"""Engines with CUDA graphs in fp32: the tokens of transformers, whatever the lengths, the neighbours and the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_traffic import MLA, graphs_of, params, prompts, replays, tokens

from rapid_infer import LLM, SamplingParams
from rapid_infer.errors import ConfigError
from rapid_infer.ops import OPS
from rapid_infer.testing import GreedyRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (1, 2, 15, 16, 17, 33, 70)
MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
LONGEST = 1600
LAST = 10

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "windowed": (
        "qwen3",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "mla": MLA,
    "experts": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
}
ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "depth-1": {"queue_depth": 1},
    "depth-1-eager": {"queue_depth": 1, "enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 16},
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        *(("llama", engine) for engine in ("chunks", "depth-1-eager")),
        *(("qwen2", engine) for engine in ("depth-1", "eager")),
        *(("qwen3", engine) for engine in ENGINES),
        ("windowed", "graphs"),
        *(("mla", engine) for engine in ENGINES),
        *(("experts", engine) for engine in ("graphs", "chunks")),
    ],
)
def test_tokens_of_transformers(name, engine, tiny, open_llm):
    model = tiny(*MODELS[name])
    runs = model.runs(LENGTHS, MAX_TOKENS)
    llm = open_llm(model, **ENGINES[engine])
    eager = "eager" in engine
    assert (graphs_of(llm) is None) == eager
    before = 0 if eager else replays(llm)
    assert tokens(llm.generate([run.prompt for run in runs], GREEDY)) == [run.tokens for run in runs]
    if not eager:
        assert replays(llm) - before >= MAX_TOKENS - 1
    llm.reset_prefix_cache()
    for run in runs[::3]:
        assert tokens(llm.generate([run.prompt], GREEDY)) == [run.tokens]


@pytest.mark.parametrize("name", ["qwen3", "mla"])
def test_references_that_say_so_can_be_recorded(name, tiny, open_llm):
    pinned = {op: ["torch"] for op in OPS if OPS[op].providers["torch"].capturable}
    model = tiny(*MODELS[name])
    runs = model.runs(LENGTHS, MAX_TOKENS)
    llm = open_llm(model, op_priority=pinned)
    before = replays(llm)
    assert tokens(llm.generate([run.prompt for run in runs], GREEDY)) == [run.tokens for run in runs]
    assert replays(llm) - before >= MAX_TOKENS - 1
    assert "rms_norm=torch" in llm.engine.executor.built.ops.pinned


def test_a_provider_that_no_graph_records_is_refused_before_anything_is_recorded(tiny):
    path, pinned = str(tiny(*MODELS["qwen3"]).path), {"paged_attention": ["torch"]}
    with pytest.raises(ConfigError, match=r"paged_attention .*torch: .*enforce_eager=True; one of these can: .*triton"):
        LLM(path, device="cuda", skip_tokenizer_init=True, op_priority=pinned)
    with LLM(path, device="cuda", skip_tokenizer_init=True, op_priority=pinned, enforce_eager=True) as llm:
        assert llm.engine.executor.built.ops.pinned == ["paged_attention=torch"]
        assert len(tokens(llm.generate([[1, 2, 3]], GREEDY))[0]) > 0


# A prompt of whole blocks and one token, cached as far as blocks go, joins with a step of one token.


@pytest.fixture
def cached_but_one(tiny) -> list[GreedyRun]:
    return tiny(*MODELS["qwen3"]).runs((17, 33, 49, 65), MAX_TOKENS, seed=1)


@pytest.mark.parametrize("engine", ["graphs", "depth-1"])
def test_a_prompt_cached_but_for_its_last_token_starts_with_a_replay(engine, cached_but_one, tiny, open_llm):
    llm = open_llm(tiny(*MODELS["qwen3"]), **ENGINES[engine])
    for cached in (False, True):
        for run in cached_but_one:
            before = replays(llm)
            [output] = llm.generate([run.prompt], GREEDY)
            assert tokens([output]) == [run.tokens]
            assert output.num_cached_tokens == (len(run.prompt) - 1 if cached else 0)
            assert replays(llm) - before == MAX_TOKENS


@pytest.mark.parametrize("profile", ["greedy", "everything"])
def test_cached_prompts_join_rows_that_run(profile, cached_but_one, tiny, open_llm):
    """In the rows, and with the settings, that others have just left."""
    llm = open_llm(tiny(*MODELS["qwen3"]), max_num_seqs=4)
    engine, got = llm.engine, {}
    llm.generate([run.prompt for run in cached_but_one], GREEDY)
    neighbours = [params(profile, seed=n, max_tokens=4 + 3 * n) for n in range(3)]
    for n, (prompt, one) in enumerate(zip(prompts([20, 30, 40]), neighbours)):
        engine.add_request(f"neighbour {n}", prompt, one)
    steps = 0
    waiting = list(cached_but_one)
    while waiting or engine.has_unfinished_requests():
        if waiting and steps % 5 == 0:
            run = waiting.pop()
            engine.add_request(f"{len(run.prompt)}", run.prompt, GREEDY)
        steps += 1
        got |= {output.request_id: output for output in engine.step()}
    for run in cached_but_one:
        output = got[str(len(run.prompt))]
        assert tokens([output]) == [run.tokens]
        assert output.num_cached_tokens == len(run.prompt) - 1


# One recorded graph serves all lengths.


@pytest.fixture
def long(tiny):
    return tiny("qwen3", {"max_position_embeddings": 2048})


@pytest.fixture
def open_long(long, open_llm):
    return lambda: open_llm(long, max_model_len=LONGEST, max_num_seqs=256, max_num_batched_tokens=2048)


def test_short_and_long_sequences_in_turn(long, open_long):
    llm = open_long()
    short, much = long.runs((3, 1500), 12, seed=2)
    greedy = SamplingParams(temperature=0, max_tokens=12)
    recorded = graphs_of(llm).recorded["decode"]
    # Alone, so all by the graphs of one row; then by those of two.
    for turn in ([short], [much], [short], [much], [much], [short], [short, much], [much, short], [short, short]):
        before = replays(llm)
        assert tokens(llm.generate([run.prompt for run in turn], greedy)) == [run.tokens for run in turn]
        assert replays(llm) - before >= 11
    assert graphs_of(llm).recorded["decode"] == recorded


def test_a_sequence_may_end_exactly_at_the_longest_length(long, open_long):
    llm = open_long()
    [run] = long.runs((LONGEST - LAST,), LAST, seed=3)
    forever = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    shorter = SamplingParams(temperature=0, max_tokens=2 * LAST, ignore_eos=True)
    almost = run.prompt + run.tokens[:-1]
    neighbours = prompts([5, 60, 300], seed=4)
    alone = tokens(llm.generate(neighbours, shorter))
    for batch in ([run.prompt], [run.prompt, *neighbours]):
        output, *others = llm.generate(batch, [forever, shorter, shorter, shorter][: len(batch)])
        assert tokens([output]) == [run.tokens]
        assert output.outputs[0].finish_reason == "length"
        assert tokens(others) == alone[: len(others)]
    # The prompt leaves room for one token, which no step computes.
    assert tokens(llm.generate([almost], forever)) == [run.tokens[-1:]]


@pytest.mark.parametrize("neighbours", [0, 1, 7, 63, 255])
def test_neighbours_change_no_token(neighbours, long, open_long):
    llm = open_long()
    [run] = long.runs((33,), 24, seed=5)
    lengths = [1 + 37 * n % 120 for n in range(neighbours)]
    batch = prompts(lengths, seed=6)
    batch.insert(neighbours // 2, run.prompt)
    before = replays(llm)
    outputs = llm.generate(batch, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert tokens(outputs)[neighbours // 2] == run.tokens
    assert replays(llm) - before >= 20
