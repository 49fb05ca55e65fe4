"""Many runs and many steps with CUDA graphs: the same bits each time, no memory lost, and NaN stays where it is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch
from gpu_traffic import MLA, PROFILES, graphs_of, params, prompts, record_all, replays, tokens, traffic

from rapid_infer import SamplingParams
from rapid_infer.worker.build import cached_modules

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROCESSES, RUNS = 3, 40

REPEATED = """
import hashlib, sys
from rapid_infer import LLM, SamplingParams

prompts = [[(31 * i + 7 * j * j) % 199 for j in range(n)] for i, n in enumerate((1, 3, 16, 17, 40, 64, 65, 120, 200))]
options = {"device": "cuda", "dtype": "bfloat16", "skip_tokenizer_init": True, "block_size": 16}
with LLM(sys.argv[1], **options, max_num_seqs=16, max_num_batched_tokens=512) as llm:
    for _ in range(int(sys.argv[2])):
        digest = hashlib.sha256()
        for logprobs in (None, 5):
            llm.reset_prefix_cache()
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=logprobs)
            for output in llm.generate(prompts, params):
                completion = output.outputs[0]
                assert completion.finish_reason == "length", completion.error
                # repr of a float gives all its bits.
                digest.update(repr((completion.token_ids, completion.logprobs)).encode())
        print(digest.hexdigest())
    assert llm.engine.executor.runner.graphs.replays["forward"] >= 2 * 23 * int(sys.argv[2])
"""


def test_runs_in_several_processes_give_the_same_bits(tiny):
    path = str(tiny("qwen3").path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", REPEATED, path, str(RUNS)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(PROCESSES)
    ]
    digests: list[str] = []
    for process in running:
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err[-3000:]
        digests += out.split()
    assert len(digests) == PROCESSES * RUNS
    assert len(set(digests)) == 1, [digests.index(digest) for digest in set(digests)]


def memory() -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def test_thousands_of_steps_of_random_traffic_keep_every_block_and_byte(tiny, open_llm):
    """In a pool so small that rows are preempted."""
    options = {"dtype": "bfloat16", "max_model_len": 272, "max_num_batched_tokens": 256}
    per_block = 2 * 2 * 2 * 16 * 2 * 16
    llm = open_llm(tiny("qwen3"), **options, kv_cache_memory_bytes=40 * per_block)
    core = llm.engine.core
    assert core.cache.num_usable == 39
    # Every graph that traffic can need, and the largest steps; what needs most comes first, since it makes tables that
    # other graphs depend on.
    for profile in list(PROFILES)[::-1]:
        scores = 5 if profile == "everything" else None
        for n in (1, 2, 4, 8, 16):
            batch = prompts([16] * n, seed=n)
            llm.generate(batch, [params(profile, i, max_tokens=4, logprobs=scores) for i in range(n)])
    longest = params("everything", max_tokens=4, logprobs=5, prompt_logprobs=3)
    llm.generate(prompts([256, 256, 160]), longest)
    record_all(llm, lambda: traffic(llm, seed=0, steps=1000))
    recorded, before, replayed, steps = graphs_of(llm).recorded, memory(), replays(llm), core.scheduler.stats.steps
    ended: dict[str, int] = {}
    for seed in (1, 2):
        for reason, n in traffic(llm, seed, steps=1250).items():
            ended[reason] = ended.get(reason, 0) + n
        core.check_integrity()
        for pool in core.cache.pools:
            assert pool.num_free == pool.num_usable
    after = memory()
    assert graphs_of(llm).recorded == recorded, "graphs were recorded that the warm-up had not needed"
    assert after["allocated"] <= before["allocated"], (before, after)
    assert after["reserved"] <= before["reserved"], (before, after)
    # All kinds of things have happened.
    assert core.scheduler.stats.steps - steps >= 2450
    assert replays(llm) - replayed > 1000
    assert core.scheduler.stats.preemptions > 0
    assert min(ended[reason] for reason in ("length", "stop", "abort")) > 5, ended


# NaN


def poison(llm, blocks: list[int] | None) -> None:
    """NaN in these cache blocks, or all; padding's block 0 included."""
    for modules in cached_modules(llm.engine.executor.runner.model).values():
        for module in modules:
            for cache in (module.cache,) if hasattr(module, "cache") else (module.k_cache, module.v_cache):
                if blocks is None:
                    cache.fill_(torch.nan)
                else:
                    cache[blocks] = torch.nan


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_row_with_nan_ends_in_an_error_and_its_neighbours_go_on(profile, depth, tiny, open_llm):
    llm = open_llm(tiny("llama"), queue_depth=depth)
    engine, core = llm.engine, llm.engine.core
    batch = prompts([20, 33, 5, 41, 18], seed=2)
    more = {"min_tokens": 30, "logprobs": 3} if profile == "everything" else {}
    settings = [params(profile, n, max_tokens=30, **more) for n in range(5)]
    expected = tokens(llm.generate(batch, settings))
    llm.reset_prefix_cache()
    names = [f"{profile} {depth} {n}" for n in range(5)]
    for name, prompt, one in zip(names, batch, settings):
        engine.add_request(name, prompt, one)
    for _ in range(6):
        engine.step()
    victim = 1
    [blocks] = [
        request.blocks[0] for request in core.scheduler.running if request.prompt_token_ids.tolist() == batch[victim]
    ]
    poison(llm, blocks[:1])
    before, got = replays(llm), {}
    while engine.has_unfinished_requests():
        got |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert replays(llm) - before >= 20
    for n, name in enumerate(names):
        completion = got[name]
        if n == victim:
            assert completion.finish_reason == "error"
            assert "non-finite" in completion.error
            assert 3 <= len(completion.token_ids) < 10
            assert completion.token_ids == expected[n][: len(completion.token_ids)]
        else:
            assert (completion.finish_reason, completion.error) == ("length", None)
            assert completion.token_ids == expected[n]
    # Neither the poisoned block nor the failed row keeps anything.
    assert tokens(llm.generate(batch, settings)) == expected
    llm.reset_prefix_cache()
    assert tokens(llm.generate(batch[::-1], settings[::-1])) == expected[::-1]


def test_nan_in_embeddings_fails_the_row_that_meets_it(tiny, open_llm):
    """A token that one row alone chooses, in the middle of its answer."""
    model = tiny("llama")
    llm = open_llm(model, queue_depth=2)
    greedy = SamplingParams(temperature=0, max_tokens=20)
    runs = model.runs((8, 21, 34), 20, seed=9)
    others = {token for run in runs[1:] for token in [*run.prompt, *run.tokens]}
    mine = runs[0]
    place, bad = next(
        (n, token)
        for n, token in enumerate(mine.tokens)
        if n >= 3 and token not in others and token not in [*mine.prompt, *mine.tokens[:n]]
    )
    weight = llm.engine.executor.runner.model.embed_tokens.weight
    kept = weight[bad].clone()
    weight.data[bad] = torch.nan
    try:
        failed, *fine = llm.generate([run.prompt for run in runs], greedy)
    finally:
        weight.data[bad] = kept
    assert failed.outputs[0].finish_reason == "error"
    assert failed.outputs[0].token_ids == mine.tokens[: place + 1]
    assert tokens(fine) == [run.tokens for run in runs[1:]]
    assert tokens(llm.generate([run.prompt for run in runs], greedy)) == [run.tokens for run in runs]


@pytest.mark.parametrize("name", ["llama", "windowed", "mla"])
def test_what_lies_in_unused_slots_does_not_matter(name, tiny, open_llm):
    windows = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    model = tiny(*{"llama": ("llama",), "windowed": ("qwen3", windows), "mla": MLA}[name])
    llm = open_llm(model, queue_depth=2)
    runs = model.runs((1, 2, 15, 16, 17, 33, 70), 20)
    poison(llm, None)
    outputs = llm.generate([run.prompt for run in runs], SamplingParams(temperature=0, max_tokens=20))
    assert tokens(outputs) == [run.tokens for run in runs]
