"""Every field of SamplingParams, end to end, against plain arithmetic on transformers' logits."""

from __future__ import annotations

import dataclasses

import pytest
from plain_sampling import Job, solve

from rapid_infer import SamplingParams
from rapid_infer.errors import RequestError

VOCAB = 61
LENGTH = 12
EOS = (7, 23)
SIZES = {"vocab_size": VOCAB}
LENGTHS = (3, 22)

GREEDY_CASES = {
    "plain": {},
    "ignore_eos": {"ignore_eos": True},
    "repetition-up": {"repetition_penalty": 1.8},
    "repetition-down": {"repetition_penalty": 0.6},
    "presence-up": {"presence_penalty": 1.5},
    "presence-down": {"presence_penalty": -1.0},
    "frequency-up": {"frequency_penalty": 0.9},
    "frequency-down": {"frequency_penalty": -0.4, "ignore_eos": True},
    "bias-one-wins": {"logit_bias": {"11": 100}},
    "bias-some-never": {"logit_bias": {str(t): -100 for t in range(0, VOCAB, 2)}},
    "bias-small": {"logit_bias": {t: (t % 5 - 2) / 2 for t in range(VOCAB)}},
    "bias-stop-wins": {"logit_bias": {EOS[1]: 100}, "min_tokens": 5},
    "allowed": {"allowed_token_ids": [0, 5, 31, 32, 33, VOCAB - 1]},
    "allowed-one": {"allowed_token_ids": [VOCAB - 1]},
    "allowed-banned": {"allowed_token_ids": [4, 5], "logit_bias": {4: -100, 9: 100}},
    "min_tokens": {"min_tokens": LENGTH - 2},
    "min_tokens-own-stops": {"min_tokens": 6, "stop_token_ids": list(range(0, VOCAB, 3))},
    "min_tokens-all": {"min_tokens": LENGTH, "stop_token_ids": list(range(30))},
    "stops-without-eos": {"min_tokens": 3, "stop_token_ids": list(range(30)), "ignore_eos": True},
    "everything": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {**{t: 1.5 for t in range(20)}, 40: 100, 3: -100},
        "allowed_token_ids": [*range(30), 40],
        "min_tokens": 6,
        "stop_token_ids": [40, 1, 2],
    },
}
"""By name, what is different from a greedy request."""

SAMPLED_CASES = {
    "sampled": {},
    "min_p": {"min_p": 0.2},
    "min_p-hot": {"min_p": 0.1, "temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "top_k-minus-one": {"top_k": -1},
    "all-cuts": {"min_p": 0.05, "top_k": 9, "top_p": 0.9, "temperature": 1.4},
    "everything-sampled": {**GREEDY_CASES["everything"], "min_p": 0.1, "top_k": 8, "top_p": 0.95},
}

GREEDY_IN_THE_END = {
    "top_k-1": {"temperature": 2.0, "top_k": 1},
    "min_p-1": {"temperature": 2.0, "min_p": 1.0},
    "temperature-below-float32": {"temperature": 1e-300},
    "temperature-just-sampled": {"temperature": 1e-5},
    "top_p-tiny": {"temperature": 2.0, "top_p": 1e-300},
    "all-tiny": {"temperature": 1e-5, "min_p": 1.0, "top_k": 1, "top_p": 1e-9},
}
"""Settings that leave one token; they must choose as `plain` does."""

EXTREMES = {
    "huge-repetition": {"repetition_penalty": 1e300},
    "tiny-repetition": {"repetition_penalty": 1e-300},
    "huge-repetition-sampled": {"temperature": 1e-5, "repetition_penalty": 1e300},
    "allowed-only-stops": {"allowed_token_ids": list(EOS), "min_tokens": 5},
    "allowed-only-stops-sampled": {"allowed_token_ids": list(EOS), "min_tokens": 5, "temperature": 1.0, "seed": 1},
    "hot": {"temperature": 1e300, "allowed_token_ids": [3, 4], "repetition_penalty": 1e-300},
    "everything-forbidden-but-one": {
        "allowed_token_ids": [9],
        "logit_bias": {9: -100},
        "repetition_penalty": 1e300,
        "presence_penalty": 2,
        "frequency_penalty": 2,
        "temperature": 1e-5,
    },
    "far": {"top_k": 2**40, "max_tokens": None, "min_tokens": 2**40, "temperature": 0.5},
}

ENGINES = {
    "depth-1": {"queue_depth": 1},
    "depth-2": {"queue_depth": 2},
    "chunks": {"queue_depth": 2, "max_num_batched_tokens": 7, "max_num_seqs": 5},
    "three-rows": {"queue_depth": 1, "max_num_seqs": 3, "enable_prefix_caching": False},
    "preempting-1": {"queue_depth": 1, "kv_blocks": 26},
    "preempting-2": {"queue_depth": 2, "kv_blocks": 26, "max_num_batched_tokens": 32},
}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama", SIZES, config_updates={"eos_token_id": list(EOS)})


@pytest.fixture
def open_engine(model, open_llm):
    def open_(kv_blocks=None, **options):
        options = {"block_size": 4, "max_model_len": 48, **options}
        if kv_blocks is not None:
            plan = open_llm(model, **options).engine.executor.cache_plan
            options["kv_cache_memory_bytes"] = kv_blocks * plan.bytes_per_block
        return open_llm(model, **options)

    return open_


def make_params(values, **more):
    return SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, **values, **more})


def job(prompt, params, index=0):
    own = () if params.ignore_eos else EOS
    return Job(prompt, params, own + params.stop_token_ids, index)


@pytest.fixture(scope="module")
def jobs(model):
    """Each case with each prompt, without close calls, next to each other as different as they can be."""
    cases = [make_params(case) for case in GREEDY_CASES.values()]
    cases += [make_params({"temperature": 0.9, **case}, seed=5 + n) for n, case in enumerate(SAMPLED_CASES.values())]
    solved = []
    for length in LENGTHS:
        open_ = list(range(len(cases)))
        for attempt in range(6):
            [prompt] = model.oracle.prompts([length], seed=100 * length + attempt)
            tried = [job(prompt, cases[i]) for i in open_]
            solve(model.oracle, tried)
            solved += [one for one in tried if one.gap > 1e-3]
            open_ = [i for i, one in zip(open_, tried) if one.gap <= 1e-3]
        assert not open_
    return sorted(solved, key=lambda one: cases.index(one.params) * 7 % len(cases))


def test_every_case_differs_from_a_plain_request(model):
    """Else it would show nothing."""
    same = {}
    for settings, plain, temperature in ((GREEDY_CASES, "plain", 0), (SAMPLED_CASES, "sampled", 0.9)):
        params = [make_params({"temperature": temperature, "seed": 3, **case}) for case in settings.values()]
        prompts = model.oracle.prompts([22] * 4, seed=4)
        tried = [[job(prompt, one) for prompt in prompts] for one in params]
        solve(model.oracle, [one for row in tried for one in row])
        tokens = dict(zip(settings, ([one.tokens for one in row] for row in tried)))
        same |= {name: True for name in settings if tokens[name] == tokens[plain]}
    assert same.keys() == {"plain", "sampled", "top_k-minus-one"}


@pytest.mark.parametrize(("engine", "n"), [*((name, 1) for name in ENGINES), ("chunks", 2), ("preempting-2", 2)])
def test_every_field_does_what_plain_arithmetic_says(engine, n, model, jobs, open_engine):
    llm = open_engine(**ENGINES[engine])
    scheduler = llm.engine.core.scheduler
    preempted = []
    original = scheduler._preempt
    scheduler._preempt = lambda row: (preempted.append(scheduler.rows.owner(row)), original(row))
    second = [job(one.prompt, one.params, index=1) for one in jobs]
    if n == 2:
        solve(model.oracle, second)
    params = [dataclasses.replace(one.params, n=n) for one in jobs]
    outputs = llm.generate([one.prompt for one in jobs], params)
    for output, *wanted in zip(outputs, jobs, second):
        for got, want in zip(output.outputs, wanted[:n]):
            # The second sample's draws were not chosen to be clear.
            if want.gap > 1e-3:
                assert (got.token_ids, got.finish_reason) == (want.tokens, want.reason), want.params
    if "preempting" in engine:
        again = [request for request in preempted if request.params.penalized and len(request.output_token_ids) > 1]
        assert len(again) > 2


def test_a_row_keeps_nothing_of_its_last_request(jobs, open_engine):
    """Each case on the one row that every other case has just left, in both orders."""
    llm = open_engine(max_num_seqs=1, queue_depth=2)
    for order in (jobs, jobs[::-1]):
        outputs = llm.generate([one.prompt for one in order], [one.params for one in order])
        assert [output.outputs[0].token_ids for output in outputs] == [one.tokens for one in order]


@pytest.mark.parametrize("name", GREEDY_IN_THE_END)
def test_settings_that_leave_one_token_choose_as_greedy_ones_do(name, jobs, open_engine):
    llm = open_engine(queue_depth=2)
    fixed = dict(GREEDY_IN_THE_END[name])
    greedy = [one for one in jobs if one.params.greedy]
    params = [dataclasses.replace(one.params, **fixed) for one in greedy]
    outputs = llm.generate([one.prompt for one in greedy], params)
    assert [output.outputs[0].token_ids for output in outputs] == [one.tokens for one in greedy]


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("depth", [1, 2])
def test_some_token_always_remains_and_nothing_is_nan(name, depth, jobs, open_engine):
    llm = open_engine(queue_depth=depth)
    mine = make_params(EXTREMES[name])
    outputs = llm.generate([one.prompt for one in jobs] * 2, [one.params for one in jobs] + [mine] * len(jobs))
    assert [output.outputs[0].token_ids for output in outputs[: len(jobs)]] == [one.tokens for one in jobs]
    for output in outputs[len(jobs) :]:
        got = output.outputs[0]
        assert got.error is None
        assert got.finish_reason in ("stop", "length")
        if mine.allowed_token_ids is not None:
            assert set(got.token_ids) <= set(mine.allowed_token_ids)
    if "allowed-only-stops" in name:
        assert all(len(output.outputs[0].token_ids) == 1 for output in outputs[len(jobs) :])


@pytest.mark.parametrize("name", ["huge-repetition", "tiny-repetition"])
def test_extreme_penalties_keep_the_order_of_what_they_touch(name, model, open_engine):
    prompts = model.oracle.prompts(LENGTHS, seed=8)
    tried = [job(prompt, make_params(EXTREMES[name])) for prompt in prompts]
    solve(model.oracle, tried)
    outputs = open_engine().generate(prompts, tried[0].params)
    assert [output.outputs[0].token_ids for output in outputs] == [one.tokens for one in tried]


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused_before_anything_runs(name, open_engine):
    llm = open_engine()
    value = {VOCAB: 1.0} if name == "logit_bias" else [VOCAB]
    with pytest.raises(RequestError, match=rf"{name} holds {VOCAB}, outside the vocabulary: expected 0 to {VOCAB - 1}"):
        llm.generate([[1, 2], [3]], [make_params({}), make_params({name: value})])
    assert not llm.engine.core.has_unfinished_requests() or llm.generate([[1]], make_params({}))


def test_a_model_s_own_stop_token_may_lie_outside_its_vocabulary(tiny, open_llm):
    llm = open_llm(tiny("llama", SIZES, config_updates={"eos_token_id": [VOCAB + 3, 2**31 - 1]}))
    [output] = llm.generate([[1, 2, 3]], make_params({"min_tokens": LENGTH}))
    assert len(output.outputs[0].token_ids) == LENGTH
