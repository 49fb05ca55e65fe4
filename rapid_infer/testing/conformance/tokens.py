"""Checks against the oracle, and of what an engine does with many requests: the tokens must not depend on it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import torch

from rapid_infer.cache.pools import shared_pools
from rapid_infer.device import probe
from rapid_infer.layers.attention import CachedModule
from rapid_infer.llm import LLM
from rapid_infer.loader.inventory import Inventory
from rapid_infer.ops import OPS, load_providers
from rapid_infer.params import SamplingParams
from rapid_infer.testing.acted_graphs import ActingRecorder
from rapid_infer.testing.compare import assert_exact, forced_logits
from rapid_infer.testing.conformance.divergence import explain
from rapid_infer.testing.conformance.subject import MAX_TOKENS, Subject, expect
from rapid_infer.worker.build import cache_groups

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SMALL: dict[str, Any] = {"block_size": 4, "max_model_len": 96}
WORSE = 1.3
"""How much larger than the oracle's own an error by rounding may be."""


def logits(subject: Subject) -> None:
    """In fp32 the oracle's tokens exactly, and its logits to 1e-4; else the first layer that differs is named."""
    runs = subject.runs
    try:
        with subject.open() as llm:
            assert_exact(llm, runs)
    except AssertionError as error:
        raise AssertionError(
            f"{error}; {explain(subject, next(run.prompt for run in runs if len(run.prompt) > 8))}"
        ) from error


def stop_ids(subject: Subject) -> None:
    """A request ends at each end-of-sequence id of config.json and of generation_config.json."""
    run = max(subject.runs, key=lambda run: len(set(run.tokens)))
    late = dict(sorted((run.tokens.index(token), token) for token in set(run.tokens)))
    second, first = list(late.values())[-2:]
    path = subject.path.with_name("stop-ids")
    shutil.copytree(subject.path, path, dirs_exist_ok=True)
    for name, value in (("config", first), ("generation_config", [second, first])):
        file = path / f"{name}.json"
        values = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**values, "eos_token_id": value}))
    with subject.open(path) as llm:
        known = set(llm.engine.inputs.info.stop_token_ids)
        for token, name in ((first, "config.json"), (second, "generation_config.json")):
            expect(
                token in known,
                f"a stop id is forgotten: {name} says eos_token_id {token}, the engine knows {sorted(known)}",
            )
        output = llm.generate([run.prompt], SamplingParams(temperature=0, max_tokens=MAX_TOKENS))[0].outputs[0]
        wanted = run.tokens[: run.tokens.index(second) + 1]
        expect(
            output.token_ids == wanted and output.finish_reason == "stop",
            f"a stop id is forgotten: {output.token_ids} ({output.finish_reason}) goes past eos_token_id {second}",
        )


def batch(subject: Subject) -> None:
    """All prompts at once, twice with shared prefixes: the same tokens, and every whole block found again."""
    with subject.open(**SMALL, queue_depth=2) as llm:
        _all_at_once(subject, llm, "in one batch")
        cached = _all_at_once(subject, llm, "with cached prefixes")
        wanted = [(len(run.prompt) - 1) // 4 * 4 for run in subject.runs]
        expect(cached == wanted, f"prompts sent again share {cached} tokens, expected {wanted}")


def chunks(subject: Subject) -> None:
    """Prompts in chunks of at most seven tokens: the same tokens."""
    with subject.open(**SMALL, max_num_batched_tokens=7, queue_depth=1, enable_prefix_caching=False) as llm:
        _all_at_once(subject, llm, "in chunks of 7 tokens")


def preemption(subject: Subject) -> None:
    """With room for little more than the longest request, requests are preempted: the same tokens."""
    with subject.open(**SMALL, max_num_batched_tokens=64) as llm:
        plan = llm.engine.executor.cache_plan
        longest = max(len(run.prompt) for run in subject.runs) + MAX_TOKENS
        size = plan.demand.bytes(longest + 4, 1) + plan.bytes_per_block
    options = {**SMALL, "max_model_len": longest + 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    with subject.open(**options, kv_cache_memory_bytes=size) as llm:
        for _ in range(2):
            _all_at_once(subject, llm, "when requests are preempted")
        expect(llm.engine.core.scheduler.stats.preemptions > 0, "no request was preempted: the sizes are too small")


def _all_at_once(subject: Subject, llm: LLM, how: str) -> list[int]:
    """Each run's cached tokens."""
    outputs = llm.generate([run.prompt for run in subject.runs], GREEDY)
    for run, output in zip(subject.runs, outputs):
        got = output.outputs[0]
        expect(
            got.token_ids == run.tokens,
            f"a prompt of {len(run.prompt)} tokens {how}: tokens {got.token_ids} {got.error or ''}, alone {run.tokens}",
        )
    return [output.num_cached_tokens for output in outputs]


def graphs(subject: Subject) -> None:
    """Steps by CUDA graphs, acted out on a CPU and real where there is a GPU: no read on the host, the same tokens."""
    load_providers()
    options = {**SMALL, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    with subject.open(**options, op_priority={name: ["torch"] for name in OPS}) as llm:
        runner = llm.engine.executor.runner
        runner.capture(16, ActingRecorder())
        _all_at_once(subject, llm, "by recorded steps")
        expect(runner.graphs.replays["forward"] > 0, "no step was replayed")
    if torch.cuda.is_available():
        prompts = [run.prompt for run in subject.runs]
        found = []
        for eager in (True, False):
            with subject.open(**options, device="cuda", enforce_eager=eager) as llm:
                found.append([output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)])
        expect(found[0] == found[1], f"on the GPU, tokens by CUDA graphs {found[1]} are not those without {found[0]}")


def dtype(subject: Subject) -> None:
    """Auto is the checkpoint's dtype where that is fast; matrices have it; rounding costs what it must."""
    path = subject.store("bfloat16")
    with subject.open(path, dtype="auto") as llm:
        _in_one_dtype(llm, "auto", "bfloat16" if probe("cpu").bfloat16 else "float32")
    with subject.open(path, dtype="bfloat16") as llm:
        _in_one_dtype(llm, "bfloat16", "bfloat16")
        if subject.case.oracle is not None:
            return
        exact, rounded = subject.oracle_of(path), subject.oracle_of(path, "bfloat16")
        mine, theirs = [], []
        for run in exact.greedy(exact.prompts((1, 16, 40)), 6):
            places = range(len(run.prompt) - 1, len(run.prompt) + 5)
            mine.append(forced_logits(llm, run) - run.logits)
            theirs.append(rounded.logits([run.prompt + run.tokens])[0, places] - run.logits)
    # By the median: where rounding gives a token another expert, its logits jump, with the oracle as well.
    ours, reference = (torch.cat(errors).abs().median().item() for errors in (mine, theirs))
    expect(
        ours <= WORSE * reference,
        f"the median error in bfloat16 is {ours:.2e}, the oracle's own {reference:.2e}: something is computed in less",
    )


def _in_one_dtype(llm: LLM, given: str, wanted: str) -> None:
    used, model = llm.engine.config.model.dtype, llm.engine.executor.built.model
    expect(used == wanted, f"dtype {given} gives {used} for a checkpoint in bfloat16, expected {wanted}")
    other = [n for n, p in model.named_parameters() if p.ndim > 1 and p.dtype != getattr(torch, wanted)]
    expect(not other, f"matrices that are not in {wanted}: {other}; create parameters in ctx.dtype")


def memory(subject: Subject) -> None:
    """Parameters hold what the files hold, and the cache takes the bytes that its specifications say."""
    with subject.open() as llm:
        built, plan = llm.engine.executor.built, llm.engine.executor.cache_plan
        model, tensors = built.model, Inventory.scan(subject.path).tensors
        stored = sum(_count(tensor.shape) for tensor in tensors.values())
        ignored = sum(_count(tensors[name].shape) for name in built.report.ignored)
        held = sum(p.numel() for p in model.parameters())
        expect(
            held == stored - ignored,
            f"the model holds {held} values, the files {stored}, {ignored} of them ignored: is a matrix held twice?",
        )
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in _caches(model)}
        groups = cache_groups(model)
        pages = sum(pool.page_bytes(plan.block_size) * n for pool, n in zip(shared_pools(groups), plan.num_blocks))
        expect(
            sum(storages.values()) == pages == plan.total_bytes,
            f"caches take {sum(storages.values())} bytes, by their specifications {pages}, planned {plan.total_bytes}",
        )


def _caches(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, CachedModule):
            yield from (v for v in vars(module).values() if isinstance(v, torch.Tensor) and v.numel() and v.ndim >= 3)


def _count(shape: Any) -> int:
    return int(torch.Size(shape).numel())
