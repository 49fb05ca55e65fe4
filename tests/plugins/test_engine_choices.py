"""Whatever the engine does with batches, chunks, blocks and memory, each request gets the tokens of transformers.

Each choice with one or two kinds of cache; `test_conformance.py` has the choices that every model meets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from rapid_infer import SamplingParams

MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SHARED = tuple(range(40, 64))
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 34, 47, 48, 49, 50, 51, 60)
MAX_MODEL_LEN = 96


@pytest.fixture(scope="module")
def runs_of():
    """44 runs: half of the prompts are random, half begin with the same 24 tokens."""
    made = {}

    def runs(model):
        if model.path not in made:
            alone = model.oracle.clear_runs(LENGTHS, MAX_TOKENS, seed=1)
            common = model.oracle.clear_runs([26 + n for n in range(len(LENGTHS))], MAX_TOKENS, seed=2, prefix=SHARED)
            made[model.path] = [run for pair in zip(alone, common) for run in pair]
            assert len(made[model.path]) == 44
        return made[model.path]

    return runs


@dataclass(frozen=True)
class Case:
    """`batch`: prompts per generate call. `pool`: usable cache blocks; None leaves it to the engine."""

    name: str
    models: str
    batch: int
    options: dict[str, Any]
    pool: int | None
    preempts: bool


def case(name: str, models: str, batch: int, chunk: int, block: int, **more: Any) -> Case:
    pool, preempts = more.pop("pool", None), more.pop("preempts", False)
    options = {"max_num_batched_tokens": chunk, "block_size": block, "max_model_len": MAX_MODEL_LEN}
    options |= {"enable_prefix_caching": more.pop("cache"), "queue_depth": more.pop("depth"), **more}
    return Case(name, models, batch, options, pool, preempts)


CASES = [
    case("alone-cached-in-chunks", "windowed", 1, 7, 4, cache=True, depth=2),
    case("threes-of-single-tokens", "mla", 3, 1, 4, cache=True, depth=1),
    case("threes-overlapping", "windowed", 3, 64, 16, cache=False, depth=2),
    case("seventeen-small-chunks", "qwen3", 17, 7, 16, cache=True, depth=2),
    case("seventeen-uncached", "windowed", 17, 64, 4, cache=False, depth=1),
    case("all-at-once", "windowed mla", 44, 2048, 16, cache=True, depth=1),
    case("all-overlapping", "windowed", 44, 64, 4, cache=True, depth=2),
    case("all-uncached-odd-blocks", "mla", 44, 64, 5, cache=False, depth=2),
    case("few-rows", "qwen3", 44, 64, 4, cache=True, depth=2, max_num_seqs=5, pool=800),
    case("one-row", "llama", 17, 64, 16, cache=True, depth=1, max_num_seqs=1, pool=300),
    case("whole-prompts", "qwen3", 44, 128, 16, cache=True, depth=2, enable_chunked_prefill=False),
    case("preempted", "llama", 44, 64, 4, cache=True, depth=1, pool=30, preempts=True),
    case("preempted-overlapping", "windowed", 44, 64, 4, cache=True, depth=2, pool=30, preempts=True),
    case("preempted-in-chunks", "mla", 44, 7, 4, cache=True, depth=2, pool=26, preempts=True),
    case("preempted-uncached", "windowed", 44, 64, 4, cache=False, depth=2, pool=30, preempts=True),
    case("preempted-big-blocks", "qwen3", 44, 2048, 16, cache=False, depth=1, pool=7, preempts=True),
    case(
        *("preempted-whole-prompts", "llama", 17, 128, 4),
        cache=True,
        depth=2,
        pool=26,
        preempts=True,
        enable_chunked_prefill=False,
    ),
]


@pytest.mark.parametrize(
    ("case", "model_name"),
    [pytest.param(case, name, id=f"{case.name}-{name}") for case in CASES for name in case.models.split()],
)
def test_tokens_do_not_depend_on_what_the_engine_does(case, model_name, request, open_llm, runs_of):
    model = request.getfixturevalue(model_name)
    runs = runs_of(model)
    options = dict(case.options)
    if case.pool is not None:
        per_block = open_llm(model, **options).engine.executor.cache_plan.bytes_per_block
        options["kv_cache_memory_bytes"] = (case.pool + 1) * per_block
    llm = open_llm(model, **options)
    size, caching = options["block_size"], options["enable_prefix_caching"]
    for warm in (False, True) if caching else (False,):
        for start in range(0, len(runs), case.batch):
            batch = runs[start : start + case.batch]
            for run, output in zip(batch, llm.generate([run.prompt for run in batch], GREEDY)):
                assert output.outputs[0].token_ids == run.tokens
                assert output.outputs[0].finish_reason == "length"
                # The last token is always computed, and only whole blocks are shared.
                most = (len(run.prompt) - 1) // size * size if caching else 0
                if warm and not case.preempts:
                    assert output.num_cached_tokens == most
                else:
                    assert output.num_cached_tokens in range(0, most + 1, size)
    assert (llm.engine.core.scheduler.stats.preemptions > 0) == case.preempts


@pytest.mark.parametrize("depth", [1, 2])
def test_each_cache_group_goes_by_its_own_block_table(depth, windowed, open_llm, runs_of):
    llm = open_llm(windowed, queue_depth=depth, block_size=4, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN)
    # One pool serves all groups, so no two tables are ever equal, and one that is mixed up with another shows.
    assert len(llm.engine.core.cache.pools) == 1
    assert llm.engine.core.cache.num_groups > 1
    runs = runs_of(windowed)
    for run, output in zip(runs, llm.generate([run.prompt for run in runs], GREEDY)):
        assert output.outputs[0].token_ids == run.tokens


def test_no_step_exceeds_its_budget_and_single_tokens_come_first(llama, open_llm, runs_of):
    llm = open_llm(llama, max_num_batched_tokens=7, block_size=4, queue_depth=2, max_model_len=MAX_MODEL_LEN)
    plans = record_plans(llm)
    llm.generate([run.prompt for run in runs_of(llama)], GREEDY)
    assert max(plan.num_tokens for plan in plans) == 7
    for plan in plans:
        assert plan.num_tokens == plan.query_lens.sum()
        longer = plan.query_lens > 1
        assert not (longer[:-1] & ~longer[1:]).any()


def test_a_late_request_is_served_before_an_old_long_one_ends(llama, open_llm, runs_of):
    llm = open_llm(llama, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN)
    engine, run = llm.engine, runs_of(llama)[0]
    engine.add_request("old", [1, 2, 3], SamplingParams(temperature=0, max_tokens=60))
    for _ in range(5):
        engine.step()
    engine.add_request("late", run.prompt, GREEDY)
    ended = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        ended += [output.request_id for output in outputs if output.finished]
        late = next((output for output in outputs if output.request_id == "late" and output.finished), None)
        if late is not None:
            assert late.outputs[0].token_ids == run.tokens
    assert ended == ["late", "old"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_given_up_halfway_leaves_nothing_behind(depth, llama, open_llm, runs_of):
    llm = open_llm(llama, block_size=4, queue_depth=depth, max_num_batched_tokens=16, max_model_len=MAX_MODEL_LEN)
    runs = runs_of(llama)
    for kept in (0, 1, 4):
        stream = llm.stream(runs[-1].prompt, GREEDY)
        tokens = [token for _, output in zip(range(kept), stream) for token in output.outputs[0].token_ids]
        stream.close()
        assert tokens == runs[-1].tokens[: len(tokens)]
    for run, output in zip(runs, llm.generate([run.prompt for run in runs], GREEDY)):
        assert output.outputs[0].token_ids == run.tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_streams_side_by_side_give_the_same_tokens(depth, qwen3, open_llm, runs_of):
    llm = open_llm(qwen3, queue_depth=depth, max_model_len=MAX_MODEL_LEN)
    runs = runs_of(qwen3)[:6]
    streams = [llm.stream(run.prompt, GREEDY) for run in runs]
    got = [[] for _ in runs]
    for _ in range(MAX_TOKENS + 1):
        for tokens, stream in zip(got, streams):
            output = next(stream, None)
            tokens += output.outputs[0].token_ids if output is not None else []
    assert got == [run.tokens for run in runs]


def record_plans(llm):
    executor, plans = llm.engine.executor, []
    launch = executor.launch

    def recorded(plan):
        plans.append(plan)
        return launch(plan)

    executor.launch = recorded
    return plans
