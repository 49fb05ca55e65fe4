"""Sampling and log-probabilities with CUDA graphs in fp32: what plain arithmetic on transformers' logits gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_traffic import replays
from plain_sampling import Job, solve

from rapid_infer import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 61
LENGTH = 12
EOS = (7, 23)
LENGTHS = (3, 22)
TOLERANCE = 1e-4

EVERYTHING = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {**{token: 1.5 for token in range(20)}, 40: 100, 3: -100},
    "allowed_token_ids": [*range(30), 40],
    "min_tokens": 6,
    "stop_token_ids": [40, 1, 2],
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8},
    "bias": {"logit_bias": {token: (token % 5 - 2) / 2 for token in range(VOCAB)}},
    "allowed": {"allowed_token_ids": [0, 5, 31, 32, 33, VOCAB - 1]},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": list(range(0, VOCAB, 3))},
    "everything": EVERYTHING,
    "sampled": {"temperature": 0.9},
    "top_k": {"temperature": 0.9, "top_k": 3},
    "top_p": {"temperature": 0.9, "top_p": 0.6},
    "min_p": {"temperature": 2.0, "min_p": 0.1},
    "all-cuts": {"temperature": 1.4, "min_p": 0.05, "top_k": 9, "top_p": 0.9},
    "everything-sampled": {**EVERYTHING, "temperature": 0.9, "min_p": 0.1, "top_k": 8, "top_p": 0.95},
}
LOGPROBS = ((None, None), (0, None), (5, 3), (20, 20), (None, 4), (2, 0))
"""Alternatives to report for tokens of the answer and of the prompt."""


@pytest.fixture(scope="module")
def model(tiny):
    return tiny("llama", {"vocab_size": VOCAB}, config_updates={"eos_token_id": list(EOS)})


def make_job(name: str, prompt: list[int], seed: int, logprobs: tuple[int | None, int | None] = (None, None)) -> Job:
    values = {"temperature": 0, "max_tokens": LENGTH, "seed": seed, **CASES[name]}
    params = SamplingParams(**values, logprobs=logprobs[0], prompt_logprobs=logprobs[1])
    return Job(prompt, params, EOS + params.stop_token_ids)


@pytest.fixture(scope="module")
def jobs(model) -> dict[str, list[Job]]:
    """Each case with each prompt and without log-probabilities, then with some; none has a close call."""
    found: dict[tuple[str, int], Job] = {}
    slots = [(name, slot) for name in CASES for slot in range(2 * len(LENGTHS))]
    for attempt in range(6):
        tried = {}
        for n, (name, slot) in enumerate(slots):
            if (name, slot) not in found:
                scores = LOGPROBS[0 if slot < len(LENGTHS) else 1 + (n // 2 + slot) % (len(LOGPROBS) - 1)]
                [prompt] = model.oracle.prompts([LENGTHS[slot % len(LENGTHS)]], seed=10 * n + attempt)
                tried[name, slot] = make_job(name, prompt, n, scores)
        solve(model.oracle, list(tried.values()))
        found |= {key: one for key, one in tried.items() if one.gap > 1e-3}
    assert len(found) == len(slots)
    return {name: [found[name, slot] for slot in range(2 * len(LENGTHS))] for name in CASES}


def check(oracle, output, want: Job) -> None:
    got, params = output.outputs[0], want.params
    assert got.error is None, got.error
    assert (got.token_ids, got.finish_reason) == (want.tokens, want.reason), params
    assert (got.logprobs is None) == (params.logprobs is None)
    if params.logprobs is not None:
        assert len(got.logprobs) == len(want.tokens)
        for found, scores, token in zip(got.logprobs, want.scores, want.tokens):
            check_position(found, scores, token, params.logprobs)
    assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
    if params.prompt_logprobs is not None:
        assert len(output.prompt_logprobs) == len(want.prompt)
        scores = oracle.logits([want.prompt])[0].double().log_softmax(-1)
        for n, token in enumerate(want.prompt[1:]):
            check_position(output.prompt_logprobs[n + 1], scores[n], token, params.prompt_logprobs)


def check_position(found, scores, chosen, count) -> None:
    order = scores.argsort(descending=True).tolist()
    assert next(iter(found)) == chosen
    # Two that are as good as equal may stand in either order.
    assert len(found) in (count, count + 1)
    assert all(float(scores[token]) >= float(scores[order[count]]) - TOLERANCE for token in found if token != chosen)
    for token, entry in found.items():
        assert abs(entry.logprob - float(scores[token])) < TOLERANCE
        better = [int((scores > scores[token] + shift).sum()) for shift in (TOLERANCE, -TOLERANCE)]
        assert better[0] < entry.rank <= better[1] + 1


def run(llm, oracle, some: list[Job]) -> None:
    for output, want in zip(llm.generate([one.prompt for one in some], [one.params for one in some]), some):
        check(oracle, output, want)


def test_every_case_differs_from_a_plain_request(model):
    """Else it would show nothing."""
    prompts = model.oracle.prompts([22] * 4, seed=4)
    tried = {name: [make_job(name, prompt, 3) for prompt in prompts] for name in CASES}
    solve(model.oracle, [one for row in tried.values() for one in row])
    answers = {name: str([one.tokens for one in row]) for name, row in tried.items()}
    assert len(set(answers.values())) == len(CASES), answers


@pytest.mark.parametrize("name", CASES)
def test_each_feature_by_graphs_of_its_own(name, model, jobs, open_llm):
    llm = open_llm(model, max_model_len=48)
    before = replays(llm)
    plain, scored = jobs[name][: len(LENGTHS)], jobs[name][len(LENGTHS) :]
    run(llm, model.oracle, plain)
    run(llm, model.oracle, scored)
    run(llm, model.oracle, plain[:1])
    assert replays(llm) - before > 0


@pytest.mark.parametrize(
    "options",
    [{}, {"queue_depth": 1}, {"max_num_batched_tokens": 7, "max_num_seqs": 5}, {"enforce_eager": True}],
    ids=["depth-2", "depth-1", "chunks", "eager"],
)
def test_all_features_in_one_batch(options, model, jobs, open_llm):
    llm = open_llm(model, max_model_len=48, **options)
    mixed = [one for slot in zip(*jobs.values()) for one in slot]
    run(llm, model.oracle, mixed)
    # The other way round every row has had another neighbour, and another owner, before.
    llm.reset_prefix_cache()
    run(llm, model.oracle, mixed[::-1])
