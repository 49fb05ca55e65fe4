"""Log-probabilities against log_softmax of transformers' logits, and masks that follow the output."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from plain_sampling import Job, solve

from rapid_infer import SamplingParams
from rapid_infer.engine.masks import pack
from rapid_infer.engine.request import Request
from rapid_infer.outputs import RequestOutputKind

VOCAB = 61
LENGTH = 10
TOLERANCE = 1e-4
LENGTHS = (1, 2, 9, 23, 33)
ENGINES = {
    "depth-1": {"queue_depth": 1},
    "depth-2": {"queue_depth": 2},
    "chunks-1": {"max_num_batched_tokens": 1, "max_num_seqs": 1, "queue_depth": 2},
    "chunks-7": {"max_num_batched_tokens": 7, "queue_depth": 2, "max_num_seqs": 5},
    "chunks-64": {"max_num_batched_tokens": 64},
    "preempting-1": {"queue_depth": 1, "kv_blocks": 22},
    "preempting-2": {"queue_depth": 2, "kv_blocks": 22, "max_num_batched_tokens": 16},
}


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama", {"vocab_size": VOCAB})


@pytest.fixture
def open_engine(model, open_llm):
    def open_(kv_blocks=None, **options):
        options = {"block_size": 4, "max_model_len": 48, **options}
        if kv_blocks is not None:
            plan = open_llm(model, **options).engine.executor.cache_plan
            options["kv_cache_memory_bytes"] = kv_blocks * plan.bytes_per_block
        return open_llm(model, **options)

    return open_


@pytest.fixture(scope="module")
def jobs(model):
    """Greedy, penalised, masked and sampled ones, with any number of alternatives, none or no log-probabilities."""
    counts = [(None, None), (0, None), (None, 0), (5, 3), (20, 20), (3, None), (None, 4), (2, 7)]
    settings = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"allowed_token_ids": [3, 4, 5], "logit_bias": {4: 1.0}},
    ]
    jobs = []
    for n, (prompt, (logprobs, prompt_logprobs)) in enumerate(
        (p, c) for p in model.oracle.prompts(LENGTHS, seed=2) for c in counts
    ):
        values = {"temperature": 0, "max_tokens": LENGTH, **settings[n % 4]}
        jobs.append(Job(prompt, SamplingParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs, **values)))
    solve(model.oracle, jobs)
    return [one for one in jobs if one.gap > 1e-3]


def assert_position(found, scores, chosen, count):
    """`found` is what one position should give: `scores` the log-probabilities of all tokens there."""
    order = scores.argsort(descending=True).tolist()
    assert next(iter(found)) == chosen
    assert set(found) == {chosen, *order[:count]}
    assert [t for t in found if t != chosen] == [t for t in order[:count] if t != chosen]
    for token, entry in found.items():
        assert abs(entry.logprob - float(scores[token])) < TOLERANCE
        assert entry.rank == order.index(token) + 1


def assert_scores(oracle, output, want):
    params, got = want.params, output.outputs[0]
    assert got.token_ids == want.tokens
    if params.logprobs is None:
        assert got.logprobs is got.cumulative_logprob is None
    else:
        assert len(got.logprobs) == len(want.tokens)
        for found, scores, token in zip(got.logprobs, want.scores, want.tokens):
            assert_position(found, scores, token, params.logprobs)
        total = sum(float(scores[token]) for scores, token in zip(want.scores, want.tokens))
        assert abs(got.cumulative_logprob - total) < TOLERANCE * len(want.tokens)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    assert len(output.prompt_logprobs) == len(want.prompt)
    assert output.prompt_logprobs[0] is None
    scores = oracle.logits([want.prompt])[0].double().log_softmax(-1)
    for n, token in enumerate(want.prompt[1:]):
        assert_position(output.prompt_logprobs[n + 1], scores[n], token, params.prompt_logprobs)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_values_ranks_and_order(engine, n, model, jobs, open_engine):
    llm = open_engine(**ENGINES[engine])
    prompts, params = [one.prompt for one in jobs], [dataclasses.replace(one.params, n=n) for one in jobs]
    for output, want in zip(llm.generate(prompts, params), jobs):
        assert_scores(model.oracle, output, want)
    if "preempting" in engine:
        assert llm.engine.core.scheduler.stats.preemptions > 0


def test_one_of_n_completions_scores_the_prompt(model, jobs, open_engine):
    llm = open_engine()
    want = next(one for one in jobs if one.params.prompt_logprobs is not None and len(one.prompt) > 8)
    scored = []
    process = llm.engine.outputs.process

    def note(step):
        scored.extend(len(pieces) for pieces in step.prompt_logprobs.values())
        return process(step)

    llm.engine.outputs.process = note
    (output,) = llm.generate([want.prompt], dataclasses.replace(want.params, n=3))
    assert_scores(model.oracle, output, want)
    assert sum(scored) == len(want.prompt) - 1


@pytest.mark.parametrize("engine", ["depth-2", "chunks-7"])
def test_prompt_logprobs_read_no_cached_prefix_and_log_probabilities_alone_do(engine, model, jobs, open_engine):
    llm = open_engine(**ENGINES[engine])
    prompts, params = [one.prompt for one in jobs], [one.params for one in jobs]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
    for output, want in zip(llm.generate(prompts, params), jobs):
        assert_scores(model.oracle, output, want)
        cached = 0 if want.params.prompt_logprobs is not None else (len(want.prompt) - 1) // 4 * 4
        assert output.num_cached_tokens == cached


@pytest.mark.parametrize("depth", [1, 2])
def test_deltas_add_up(depth, jobs, open_engine):
    llm = open_engine(queue_depth=depth, max_num_batched_tokens=24)
    kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
    seen = {}
    for i, one in enumerate(jobs):
        for kind in kinds:
            seen[i, kind] = []
            params = dataclasses.replace(one.params, n=1 + i % 2)
            llm.engine.add_request(f"{i}/{kind.value}", one.prompt, params, output_kind=kind)
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            i, kind = output.request_id.split("/")
            seen[int(i), RequestOutputKind(int(kind))].append(copy.deepcopy(output))
    for i in range(len(jobs)):
        cumulative, deltas, final = (seen[i, kind] for kind in kinds)
        assert len(final) == 1
        assert min(len(deltas), len(cumulative)) >= LENGTH
        wanted = cumulative[-1]
        for c, want in enumerate(wanted.outputs):
            parts = [part for delta in deltas for part in delta.outputs if part.index == c]
            assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [want.finish_reason]
            assert [token for part in parts for token in part.token_ids] == want.token_ids
            assert c == 1 or want.token_ids == jobs[i].tokens
            if want.logprobs is not None:
                assert_same([position for part in parts for position in part.logprobs], want.logprobs)
                assert_same(final[0].outputs[c].logprobs, want.logprobs)
                assert parts[-1].cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=LENGTH * TOLERANCE)
            for earlier in cumulative:
                length = len(earlier.outputs[c].token_ids)
                assert earlier.outputs[c].token_ids == want.token_ids[:length]
                assert earlier.outputs[c].logprobs == (want.logprobs and want.logprobs[:length])
            last = final[0].outputs[c]
            assert (last.token_ids, last.finish_reason) == (want.token_ids, want.finish_reason)
            assert parts[-1].finish_reason == want.finish_reason
        if wanted.prompt_logprobs is not None:
            assert_same([position for delta in deltas for position in delta.prompt_logprobs], wanted.prompt_logprobs)
            assert len(wanted.prompt_logprobs) == len(jobs[i].prompt)


def assert_same(one, other):
    """The same but for rounding, which depends on what else a step computes."""
    assert len(one) == len(other)
    for a, b in zip(one, other):
        assert (a is None) == (b is None)
        if a is not None:
            assert {token: entry.rank for token, entry in a.items()} == {
                token: entry.rank for token, entry in b.items()
            }
            assert all(abs(entry.logprob - b[token].logprob) < TOLERANCE for token, entry in a.items())


class Alternating:
    """An even id, then an odd one, and so on: the next token cannot be known before the last one."""

    changes = True

    def __init__(self):
        self.seen = []

    @staticmethod
    def allowed(output):
        return range((output[-1] + 1) % 2 if output else 0, VOCAB, 2)

    def bits(self, output_token_ids):
        self.seen.append(list(output_token_ids))
        return pack(self.allowed(output_token_ids), VOCAB)


class Broken(Alternating):
    def bits(self, output_token_ids):
        if len(output_token_ids) == 3:
            raise ValueError("no such rule")
        return super().bits(output_token_ids)


def run_core(llm, requests):
    """Add the requests; their ends, and what the executor was told: `(name, plan)`, or the handle's plan."""
    core, calls, ends = llm.engine.core, [], {}

    def noted(name):
        call = getattr(core.executor, name)

        def wrapped(first, *more):
            calls.append((name, getattr(first, "plan", first)))
            return call(first, *more)

        setattr(core.executor, name, wrapped)

    for name in ("launch", "launch_forward", "launch_sample", "collect"):
        noted(name)
    for one in requests:
        core.add_request(one)
    while core.has_unfinished_requests():
        ends |= {finished.request_id: finished for finished in core.step().finished}
    for name in ("launch", "launch_forward", "launch_sample", "collect"):
        delattr(core.executor, name)
    return calls, ends


def core_requests(jobs, mask):
    requests = []
    for n, one in enumerate(jobs):
        ids = np.array(one.prompt, np.int32)
        made = Request(str(n), ids, one.params, (), len(ids) + LENGTH, cache_salt=None)
        made.mask = mask() if one.allowed else None
        requests.append(made)
    return requests


@pytest.fixture(scope="module")
def mixed(model):
    """Gated requests, some of them penalised, between free ones."""
    params = [{}, {"repetition_penalty": 1.4}, {"min_tokens": 3, "logit_bias": {6: 2.0}}, {"presence_penalty": 1.0}]
    jobs = []
    for n, prompt in enumerate(model.oracle.prompts([5, 6, 9, 17, 21, 30, 3, 12], seed=6)):
        settings = SamplingParams(temperature=0, max_tokens=LENGTH, **params[n // 2])
        jobs.append(Job(prompt, settings, allowed=Alternating.allowed if n % 2 else None))
    solve(model.oracle, jobs)
    assert min(one.gap for one in jobs) > 1e-3
    return jobs


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mask_that_follows_the_output(engine, mixed, open_engine):
    llm = open_engine(**ENGINES[engine])
    requests = core_requests(mixed, Alternating)
    run_core(llm, requests)
    assert [one.output_token_ids for one in requests] == [one.tokens for one in mixed]
    for request in requests[1::2]:
        assert all(request.output_token_ids[: len(seen)] == seen for seen in request.mask.seen)
        assert {len(seen) for seen in request.mask.seen} == set(range(LENGTH))


@pytest.mark.parametrize("depth", [1, 2])
def test_gated_rows_run_in_every_step_beside_free_ones(depth, mixed, open_engine):
    llm = open_engine(queue_depth=depth)
    calls, _ = run_core(llm, core_requests(mixed, Alternating))
    plans = [plan for name, plan in calls if name.startswith("launch") and name != "launch_sample"]
    assert all(set(plan.rows[plan.sampled].tolist()) == set(range(8)) for plan in plans[:LENGTH])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forward_is_begun_before_the_tokens_that_its_masks_follow_are_read(depth, mixed, open_engine):
    llm = open_engine(queue_depth=depth)
    calls, _ = run_core(llm, core_requests(mixed, Alternating))
    names = [(name, plan.step - calls[0][1].step) for name, plan in calls]
    one_by_one = ["launch_forward", "launch_sample", "collect"]
    expected = [(name, step) for step in range(LENGTH) for name in one_by_one]
    if depth == 2:
        middle = [
            call
            for step in range(1, LENGTH)
            for call in (("launch_forward", step), ("collect", step - 1), ("launch_sample", step))
        ]
        expected = [("launch_forward", 0), ("launch_sample", 0), *middle, ("collect", LENGTH - 1)]
    assert names == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_mask_that_raises_ends_its_own_request(depth, mixed, open_engine):
    llm = open_engine(queue_depth=depth)
    requests = core_requests(mixed, Alternating)
    requests[3].mask = Broken()
    _, ends = run_core(llm, requests)
    assert (ends["3"].reason, ends["3"].error) == ("error", "the token mask raised ValueError: no such rule")
    assert requests[3].output_token_ids == mixed[3].tokens[:3]
    others = [n for n in range(8) if n != 3]
    assert [requests[n].output_token_ids for n in others] == [mixed[n].tokens for n in others]
    after = core_requests(mixed, Alternating)
    run_core(llm, after)
    assert [one.output_token_ids for one in after] == [one.tokens for one in mixed]


def test_a_mask_of_another_vocabulary_ends_its_own_request(mixed, open_engine):
    class Narrow(Alternating):
        def bits(self, output_token_ids):
            return super().bits(output_token_ids)[:-1]

    requests = core_requests(mixed, Alternating)
    requests[5].mask = Narrow()
    _, ends = run_core(open_engine(), requests)
    assert ends["5"].reason == "error"
    assert f"do not make a bit for each of {VOCAB} tokens" in ends["5"].error
    others = [n for n in range(8) if n != 5]
    assert [requests[n].output_token_ids for n in others] == [mixed[n].tokens for n in others]


def test_log_probabilities_are_raw_also_behind_a_mask(model, open_engine):
    llm = open_engine()
    [prompt] = model.oracle.prompts([8], seed=1)
    scores = model.oracle.logits([prompt])[0, -1].log_softmax(-1)
    worst = int(scores.argmin())
    params = SamplingParams(temperature=2.0, top_k=1, allowed_token_ids=[worst], max_tokens=1, logprobs=1)
    [found] = llm.generate([prompt], params)[0].outputs[0].logprobs
    assert list(found) == [worst, int(scores.argmax())]
    assert found[worst].rank == VOCAB
    torch.testing.assert_close(torch.tensor(found[worst].logprob), scores[worst], atol=TOLERANCE, rtol=0)
