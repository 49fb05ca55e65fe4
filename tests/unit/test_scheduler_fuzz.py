"""Random episodes on the fake device: whatever happens, blocks are conserved and tokens are those of a quiet run."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_executor import SPEC, VOCAB, Failures, ToyKV, ToyState, undisturbed
from harness import Harness

from rapid_infer.cache import prefix
from rapid_infer.cache.budget import CacheDemand
from rapid_infer.cache.spec import MLAKV, CacheGroup
from rapid_infer.engine.step_plan import StepPlan
from rapid_infer.outputs import FinishReason

FULL, MLA = CacheGroup(ToyKV(1, 8, "float32"), 1), CacheGroup(MLAKV(8, 4, "float32"), 1)


def window(tokens: int) -> CacheGroup:
    return CacheGroup(ToyKV(1, 8, "float32", tokens), 1)


def state(every: int) -> CacheGroup:
    return CacheGroup(ToyState(every), 1)


GROUPS = {
    "full": [CacheGroup(SPEC, 1)],
    "two pools": [CacheGroup(SPEC, 2), MLA],
    "windows": [FULL, window(5), window(5)],
    "windows alone": [window(3), window(9)],
    "window and latent": [window(6), MLA],
    "state": [FULL, state(1)],
    "sparse states": [state(3), FULL, window(4)],
}


def random_options(rng: random.Random, kinds: Sequence[str]) -> dict[str, Any]:
    block_size = rng.choice([1, 2, 3, 4, 8])
    max_model_len = rng.randint(2, 48)
    chunked = rng.random() < 0.7
    max_num_seqs = rng.randint(1, 6)
    budget = rng.randint(1, 24) if chunked else max_model_len + rng.randint(0, 12)
    groups = GROUPS[rng.choice(kinds)]
    demand, more = CacheDemand(groups, block_size, budget, max_num_seqs), rng.choice([0, 0, 1, 3, 10, 40])
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "enable_chunked_prefill": chunked,
        "queue_depth": rng.randint(1, 2),
        "num_blocks": [demand.blocks(pool, max_model_len) + 1 + more for pool in demand.pools],
        "groups": groups,
    }


def random_failures(rng: random.Random) -> Failures:
    """Each kind is absent from half of the episodes, rare in some and frequent in others."""
    launch, collect, row = (rng.choice([0.0, 0.0, 0.03, 0.2]) for _ in range(3))
    noise = random.Random(rng.random())

    def rows(plan: StepPlan) -> np.ndarray:
        return np.array([noise.random() < row for _ in plan.sampled], bool)

    def fails(rate: float) -> Callable[[int], bool]:
        return lambda step: noise.random() < rate

    return Failures(launch=fails(launch), collect=fails(collect), sample=fails(launch), rows=rows)


class Follower:
    """A mask that forbids nothing, and notes which outputs it was asked about; now and then it raises."""

    changes = True

    def __init__(self, rng: random.Random) -> None:
        self.seen: list[list[int]] = []
        self._raises_at = rng.choice([None, None, 2, 5])

    def bits(self, output_token_ids: Sequence[int]) -> np.ndarray:
        self.seen.append(list(output_token_ids))
        if self._raises_at == len(output_token_ids):
            raise ValueError("no rule for this")
        return np.full(-(-VOCAB // 32), -1, np.int32)


def random_prompt(rng: random.Random, longest: int, prefixes: list[list[int]]) -> list[int]:
    """Often a piece of a common prefix, cut anywhere, so that hits end on, before and after block boundaries."""
    start = rng.choice(prefixes)[: rng.randint(0, longest)] if rng.random() < 0.8 else []
    tail = [rng.randrange(VOCAB) for _ in range(rng.randint(0 if start else 1, 8))]
    return (start + tail)[:longest]


def run_episode(seed: int, kinds: Sequence[str] = ("full", "two pools"), drafts: int = 0) -> Harness:
    rng = random.Random(seed)
    options = random_options(rng, kinds)
    engine = Harness(failures=random_failures(rng), drafts=drafts, **options)
    length, sharing = options["max_model_len"], rng.random() < 0.8
    prefixes = [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(rng.randint(1, 2))]
    to_add, abort_rate = rng.randint(1, 20), rng.choice([0.0, 0.1, 0.4])
    gate_rate = rng.choice([0.0, 0.0, 0.3, 1.0])
    for _ in range(2000):
        while to_add and rng.random() < 0.5:
            to_add -= 1
            prompt = random_prompt(rng, length - 1, prefixes)
            limit = rng.randint(1, length - len(prompt))
            stop = tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 4])))
            name = str(len(engine.requests))
            share = rng.choice([b"", b"", b"other"]) if sharing else None
            mask = Follower(rng) if rng.random() < gate_rate else None
            engine.add(name, prompt, limit, stop=stop, share=share, mask=mask)
        live = [name for name in engine.requests if name not in engine.ends]
        if live and rng.random() < abort_rate:
            engine.core.abort([rng.choice(live)])
        if rng.random() < 0.01:
            engine.core.reset_prefix_cache()
        if engine.core.has_unfinished_requests():
            engine.step()
        elif not to_add:
            break
    engine.run(max_steps=0)
    return engine


def check_tokens(engine: Harness, seed: int) -> None:
    for name, request in engine.requests.items():
        expected, got = undisturbed(request), engine.tokens[name]
        assert got == request.output_token_ids
        if isinstance(request.mask, Follower):
            # Asked about every output that a token was chosen after, complete each time.
            assert all(got[: len(output)] == output for output in request.mask.seen)
            assert {len(output) for output in request.mask.seen} >= set(range(len(got)))
        if engine.ends[name].reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert got == expected, f"seed {seed}: request {name}"
        else:
            assert got == expected[: len(got)], f"seed {seed}: request {name}"
        if request.cache_salt is not None:
            size = engine.cache.block_size
            chain: list[bytes] = []
            tokens = [*request.prompt_token_ids.tolist(), *got]
            prefix.extend(chain, prefix.root(size, request.cache_salt), tokens, size)
            assert request.block_hashes == chain[: len(request.block_hashes)], f"seed {seed}: request {name}"


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_episodes(kind: str, drafts: int, half: int) -> None:
    seen = dict.fromkeys(["stop", "length", "abort", "error"], 0)
    preemptions = hits = guesses = 0
    first = 1000 * list(GROUPS).index(kind) + 75 * half
    for seed in range(first, first + 75):
        engine = run_episode(seed, [kind], drafts)
        check_tokens(engine, seed)
        preemptions += engine.scheduler.stats.preemptions
        hits += engine.cache.hit_tokens
        guesses += sum(int(plan.drafts.sum()) for plan in engine.plans if plan.drafts is not None)
        for finished in engine.ends.values():
            seen[finished.reason.value] += 1
    # An episode in which nothing happens proves nothing.
    assert min(seen.values()) >= 10, seen
    assert preemptions >= 5
    assert hits >= 50
    # States cannot be taken back.
    assert (guesses > 100) == (drafts > 0 and "state" not in kind)
