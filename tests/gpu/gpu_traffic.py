"""Requests for these tests: sampling parameters by what they need of a step, and random traffic of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import torch

from rapid_infer import LLM, SamplingParams
from rapid_infer.outputs import RequestOutput, RequestOutputKind
from rapid_infer.worker.graph_runner import DECODE, GREEDY, MIXED

VOCAB = 199

MLA: tuple[str, dict[str, Any]] = (
    "deepseek_v3",
    {
        "num_key_value_heads": 4,
        "q_lora_rank": 40,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        # What transformers rotates.
        "head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
    },
)
"""Model type, and what differs from TINY."""

PROFILES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
    "everything": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {token: 0.5 for token in range(8)},
        "allowed_token_ids": list(range(150)),
        "min_tokens": 2,
        "stop_token_ids": [11, 12, 13],
    },
}
"""Each needs all that the one before needs: rows of several profiles together need what the last of them needs, so
there are as many kinds of steps as profiles."""


def params(profile: str, seed: int = 0, **more: Any) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": True, "seed": seed, **PROFILES[profile], **more})


def prompts(lengths: tuple[int, ...] | list[int] | range, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(VOCAB) for _ in range(length)] for length in lengths]


def graphs_of(llm: LLM) -> Any:
    runner: Any = llm.engine.executor.runner
    return runner.graphs


def replays(llm: LLM) -> int:
    """Steps replayed so far; both of their graphs are counted."""
    counts = graphs_of(llm).replays
    assert counts["forward"] == counts["sample"]
    return counts["forward"]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    for output in outputs:
        for completion in output.outputs:
            assert completion.error is None, completion.error
    return [completion.token_ids for output in outputs for completion in output.outputs]


def traffic(llm: LLM, seed: int, steps: int) -> dict[str, int]:
    """Requests that come, run and go for `steps` engine steps; then all still there are aborted.

    Counts how many of them ended in which way. AssertionError when one ended in an error.
    """
    numbers, engine = random.Random(seed), llm.engine
    common = prompts([100], seed=5)[0]
    active: list[str] = []
    ended: dict[str, int] = {}
    names = [f"traffic-{seed}-{n}" for n in range(steps)]

    def one_step() -> None:
        for output in engine.step():
            if output.finished:
                active.remove(output.request_id)
                for completion in output.outputs:
                    assert completion.finish_reason != "error", completion.error
                    reason = str(completion.finish_reason)
                    ended[reason] = ended.get(reason, 0) + 1

    for name in names:
        if len(active) < 40 and numbers.random() < 0.25:
            prompt = prompts([numbers.randint(1, 120)], seed=numbers.getrandbits(32))[0]
            if numbers.random() < 0.4:
                prompt = common[: numbers.randint(1, 100)] + prompt[:60]
            profile = numbers.choice(list(PROFILES))
            more: dict[str, Any] = {"max_tokens": numbers.randint(2, 60)}
            if profile == "everything":
                more |= {"logprobs": 5, "prompt_logprobs": numbers.choice([None, None, 3])}
            one = params(profile, numbers.getrandbits(40), **more)
            engine.add_request(name, prompt, one, output_kind=RequestOutputKind.FINAL_ONLY)
            active.append(name)
        if active and numbers.random() < 0.03:
            engine.abort([numbers.choice(active)])
        one_step()
    engine.abort(active)
    while engine.has_unfinished_requests() or engine.core.has_unfinished_requests():
        one_step()
    return ended


def record_all(llm: LLM, run: Callable[[], object]) -> None:
    """Do `run`, then record every sample graph that steps with the features it met can need."""
    graphs = graphs_of(llm)
    sample, met = graphs.launch_sample, {GREEDY: None}

    def noted(key, features):
        met[features] = None
        return sample(key, features)

    graphs.launch_sample = noted
    try:
        run()
    finally:
        del graphs.launch_sample
    torch.cuda.synchronize()
    with torch.inference_mode():
        for kind, size, features in itertools.product((DECODE, MIXED), graphs.sizes, met):
            if graphs._sample_key(kind, size, features) not in graphs._sample:
                graphs.capture_sample(kind, size, features)
    torch.cuda.synchronize()
