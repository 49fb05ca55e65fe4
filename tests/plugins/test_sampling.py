"""Sampled tokens: repeatable by seed, whoever runs beside them, and distributed as the logits say."""

from __future__ import annotations

import math

import pytest
import torch

from rapid_infer import SamplingParams
from rapid_infer.errors import RequestError
from rapid_infer.testing import record_logits

GREEDY = SamplingParams(temperature=0, max_tokens=10)
PROMPT = [3, 14, 15, 92, 65, 35]
DRAWS = 4000


def tokens(outputs):
    return [completion.token_ids for output in outputs for completion in output.outputs]


def sampled(seed, **more):
    return SamplingParams(temperature=0.9, max_tokens=10, seed=seed, **more)


@pytest.fixture
def flat(tiny):
    """A vocabulary so small, and logits so flat, that every token turns up often."""
    return tiny("llama", {"vocab_size": 23}, gain=0.9)


def test_a_seed_gives_its_tokens_in_any_company(llama, open_llm):
    prompts = llama.oracle.prompts([5, 17, 30, 44, 9, 21], seed=3)
    params = [sampled(100 + n, top_k=(0, 40)[n % 2], top_p=(1.0, 0.9, 0.7)[n % 3]) for n in range(6)]
    alone = [tokens(open_llm(llama).generate([p], one))[0] for p, one in zip(prompts, params)]
    assert len({tuple(t) for t in alone}) == 6
    crowd = [*prompts, *llama.oracle.prompts([8] * 20, seed=4)]
    mixed = [*params, *([GREEDY] * 10), *(SamplingParams(max_tokens=4) for _ in range(10))]
    for options in (
        {},
        {"queue_depth": 2, "max_num_batched_tokens": 7},
        {"max_num_seqs": 3, "block_size": 4},
        {"seed": 99},
    ):
        llm = open_llm(llama, **options)
        assert tokens(llm.generate(crowd, mixed))[:6] == alone
        assert tokens(llm.generate(crowd[::-1], mixed[::-1]))[::-1][:6] == alone


def test_a_preempted_request_draws_the_same(llama, open_llm):
    prompts = llama.oracle.prompts([20] * 8, seed=5)
    params = [sampled(n) for n in range(8)]
    options = {"block_size": 4, "max_model_len": 64}
    roomy = open_llm(llama, **options)
    expected = tokens(roomy.generate(prompts, params))
    for depth in (1, 2):
        plan = roomy.engine.executor.cache_plan
        tight = open_llm(llama, **options, queue_depth=depth, kv_cache_memory_bytes=18 * plan.bytes_per_block)
        assert tokens(tight.generate(prompts, params)) == expected
        assert tight.engine.core.scheduler.stats.preemptions > 0


def test_without_a_seed_the_engine_s_seed_and_the_order_of_arrival_decide(llama, open_llm):
    params = SamplingParams(temperature=1.0, max_tokens=10)
    first, again, other = (tokens(open_llm(llama, seed=s).generate([PROMPT] * 4, params)) for s in (1, 1, 2))
    assert first == again
    assert len({tuple(t) for t in first + other}) == 8


def test_a_refused_call_changes_no_later_draw(llama, open_llm):
    params = SamplingParams(temperature=1.0, max_tokens=10)
    one, other = open_llm(llama), open_llm(llama)
    for bad in ([PROMPT, PROMPT, [10**9]], [PROMPT, []]):
        with pytest.raises(RequestError):
            one.generate(bad, params)
    with pytest.raises(RequestError):
        one.stream([10**9], params)
    assert tokens(one.generate([PROMPT] * 2, params)) == tokens(other.generate([PROMPT] * 2, params))


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 1, 2**32, 2**63 - 1])
def test_seeds_of_64_bits(seed, llama, open_llm):
    llm = open_llm(llama)
    one, two = tokens(llm.generate([PROMPT] * 2, sampled(seed)))
    assert one == two
    neighbours = [tokens(llm.generate([PROMPT], sampled(s)))[0] for s in (seed ^ 1, seed ^ 2**40)]
    assert one not in neighbours


def test_greedy_rows_are_exact_beside_sampled_ones(qwen3, open_llm):
    runs = qwen3.oracle.clear_runs([4, 9, 16, 25, 31], 10, seed=6)
    llm = open_llm(qwen3)
    prompts = [prompt for run in runs for prompt in (run.prompt, run.prompt, run.prompt)]
    params = [GREEDY, SamplingParams(temperature=1.5, max_tokens=10), sampled(1, top_k=3, top_p=0.5)] * len(runs)
    assert tokens(llm.generate(prompts, params))[::3] == [run.tokens for run in runs]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.5, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1e-6},
        {"temperature": 2e-5},
        {"temperature": 5.0, "top_k": 1, "top_p": 0.5},
    ],
    ids=str,
)
def test_settings_that_leave_one_token_are_greedy(params, qwen3, open_llm):
    runs = qwen3.oracle.clear_runs([4, 9, 16, 25, 31], 10, seed=6)
    outputs = open_llm(qwen3).generate([run.prompt for run in runs], SamplingParams(max_tokens=10, **params))
    assert tokens(outputs) == [run.tokens for run in runs]


def test_settings_that_keep_everything_change_nothing(qwen3, open_llm):
    llm = open_llm(qwen3)
    plain, *others = (
        tokens(llm.generate([PROMPT], sampled(8, **off)))
        for off in ({}, {"top_k": 0}, {"top_k": -1}, {"top_k": 199}, {"top_k": 10**6}, {"top_p": 1.0})
    )
    assert all(other == plain for other in others)


def truncated(logits, temperature, top_k=0, top_p=1.0):
    """Probabilities by definition, token by token."""
    probability = (logits.double() / temperature).softmax(-1)
    order = sorted(range(len(logits)), key=lambda token: -float(probability[token]))
    kept = order[:top_k] if top_k else order
    mass, reached, within = sum(float(probability[token]) for token in kept), 0.0, []
    for token in kept:
        if reached >= top_p * mass:
            break
        within.append(token)
        reached += float(probability[token])
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[within] = probability[within] / probability[within].sum()
    return result


def assert_drawn_from(counts, probability):
    """Chi-square over the tokens expected at least five times, the rest as one. One in a million fails by chance."""
    assert counts[probability == 0].sum() == 0, "a token outside the truncated set was drawn"
    total = counts.sum()
    expected = probability * total
    often = expected >= 5
    groups = [(counts[often].double(), expected[often])]
    if expected[~often].sum() >= 5:
        groups.append((counts[~often].sum().double()[None], expected[~often].sum()[None]))
    got, want = (torch.cat(parts) for parts in zip(*groups))
    chi = float(((got - want) ** 2 / want).sum())
    freedom = len(got) - 1
    # Wilson and Hilferty: the cube root of chi-square over its degrees of freedom is nearly normal.
    deviation = ((chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    print(f"chi-square {chi:.1f} at {freedom} degrees of freedom, {deviation:+.2f} standard deviations")
    assert deviation < 4.8


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_k": 6}, {"top_p": 0.6}, {"top_k": 9, "top_p": 0.85}],
    ids=["plain", "top_k", "top_p", "top_k-top_p"],
)
@pytest.mark.parametrize("how", ["requests", "seeds", "completions"])
def test_draws_follow_the_softmax(how, settings, flat, open_llm):
    llm = open_llm(flat, max_num_seqs=500, max_num_batched_tokens=8192, kv_cache_memory_bytes=1 << 24)
    params = {"temperature": 0.7, "max_tokens": 1, **settings}
    prompt = PROMPT[:3]
    with record_logits(llm) as recorded:
        llm.generate([prompt], GREEDY)
    probability = truncated(recorded[0][0], 0.7, **settings)
    kept = int((probability > 0).sum())
    assert kept == {(): 23, ("top_k",): 6}.get(tuple(settings), kept)
    assert 3 <= kept < 23 or not settings
    if how == "requests":
        outputs = llm.generate([prompt] * DRAWS, SamplingParams(**params))
    elif how == "seeds":
        outputs = llm.generate([prompt] * DRAWS, [SamplingParams(seed=seed, **params) for seed in range(DRAWS)])
    else:
        outputs = llm.generate([prompt], SamplingParams(n=DRAWS, seed=12, **params))
    drawn = torch.tensor([token for t in tokens(outputs) for token in t])
    assert len(drawn) == DRAWS
    assert_drawn_from(drawn.bincount(minlength=23), probability)
    # Draws next to each other in seed, arrival or sample index must not be related.
    pairs = (drawn[:-1] * 23 + drawn[1:]).bincount(minlength=23 * 23)
    assert_drawn_from(pairs, torch.outer(probability, probability).flatten())


def test_positions_draw_independently(flat, open_llm):
    """With the same logits at every step, whatever the tokens before."""
    llm = open_llm(flat, max_num_seqs=500, max_num_batched_tokens=8192, kv_cache_memory_bytes=1 << 24)
    head = llm.engine.executor.runner.model.head
    logits = torch.linspace(-1.0, 1.0, 23)
    head.logits = lambda hidden, rows=None: logits.expand(len(hidden), 23)
    outputs = llm.generate([[1]] * 40, SamplingParams(temperature=0.7, max_tokens=100))
    drawn = torch.tensor(tokens(outputs))
    probability = (logits / 0.7).double().softmax(-1)
    assert_drawn_from(drawn.flatten().bincount(minlength=23), probability)
    pairs = (drawn[:, :-1] * 23 + drawn[:, 1:]).flatten().bincount(minlength=23 * 23)
    assert_drawn_from(pairs, torch.outer(probability, probability).flatten())
