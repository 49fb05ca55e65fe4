"""Four layers of the size of Qwen3-8B in bf16, loaded from files: the memory they take, and transformers' results."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_traffic import graphs_of, params, tokens

from rapid_infer import LLM
from rapid_infer.cache.budget import GIB
from rapid_infer.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.device_alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
GAIN = 0.5
"""Of the random matrices: with it transformers in bf16 is about 1 % from transformers in fp32."""
UTILIZATION = 0.1
LEAST, BESIDE = 6 * GIB, 8 * GIB
"""For an engine with the model, and for transformers beside it, in bf16 and in fp32."""
TOLERANCE = 2e-2
CLEAR = 0.16
"""A gap between the two best logits that rounding does not close, relative to the spread of all logits."""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Made on the GPU: on one CPU thread it would take a minute."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    free, total = torch.cuda.mem_get_info()
    if free < UTILIZATION * total + BESIDE or UTILIZATION * total < LEAST:
        pytest.skip(
            f"{free / GIB:.0f} of {total / GIB:.0f} GiB are free; expected {UTILIZATION:.0%}, which must be "
            f"{LEAST / GIB:.0f} GiB, and {BESIDE / GIB:.0f} GiB more: use a larger GPU, or end what else runs on it"
        )
    path = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**CONFIG), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
            if parameter.ndim >= 2:
                parameter.mul_(GAIN / parameter.shape[-1] ** 0.5)
            else:
                parameter.mul_(0.2).add_(1.0)
    model.save_pretrained(path)
    del model, parameter
    free_all()
    return path


@pytest.fixture(scope="module")
def llm(path) -> Iterator[LLM]:
    with LLM(str(path), device="cuda", skip_tokenizer_init=True, gpu_memory_utilization=UTILIZATION) as llm:
        yield llm
    free_all()


@pytest.fixture(scope="module")
def theirs(llm, path) -> Iterator[Any]:
    """transformers' model, in bf16. It comes after the engine, which would count its memory as taken."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    yield model.eval().to("cuda")
    del model
    free_all()


def free_all() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def used() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def random_prompts(lengths: list[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(CONFIG["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def test_the_memory_profile_adds_up_and_is_kept(llm):
    executor = llm.engine.executor
    memory, plan = executor.memory, executor.cache_plan
    allowed = int(memory.total * UTILIZATION)
    assert memory.total == torch.cuda.mem_get_info()[1]
    assert memory.utilization == UTILIZATION
    parts = (memory.weights, memory.other, memory.step, memory.graphs, memory.cache)
    assert sum(parts) == allowed
    assert min(parts) > 0
    weights = sum(p.numel() * p.element_size() for p in executor.runner.model.parameters())
    assert weights > 1.4 * GIB
    assert weights <= memory.weights < weights + GIB
    # The model could use more than it got: the cache takes all that is left.
    assert memory.cache - plan.bytes_per_block < plan.total_bytes <= memory.cache
    assert f"{memory.cache / GIB:.2f} GiB left for the KV cache" in str(memory)
    assert 0.85 * allowed < used() <= allowed


def test_the_largest_steps_stay_within_the_memory_allowed(llm):
    """Prompts that fill the step's budget with all that sampling can be asked for, then as many rows as there are."""
    allowed = UTILIZATION * llm.engine.executor.memory.total
    settings = {"allowed_token_ids": None, "logprobs": 20, "max_tokens": 8}
    tokens(llm.generate(random_prompts([32] * 256, 1), params("everything", **settings)))
    assert used() <= allowed
    tokens(llm.generate(random_prompts([8000], 2), params("everything", **settings, prompt_logprobs=20)))
    assert used() <= allowed


def test_nothing_left_for_the_cache_is_an_error_with_its_arithmetic(tiny):
    options = {"device": "cuda", "skip_tokenizer_init": True, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    with pytest.raises(ConfigError) as raised:
        LLM(str(tiny("qwen3").path), **options, gpu_memory_utilization=0.002)
    message = str(raised.value)
    assert "KV cache" in message
    # What weights, cache and step need, and what there is.
    assert len(re.findall(r"\d+\.\d+", message)) >= 4, message
    assert "gpu_memory_utilization" in message


def test_logits_and_tokens_of_transformers_within_tolerance(llm, theirs):
    prompts = random_prompts([5, 70, 300], 3)
    runner, graphs = llm.engine.executor.runner, graphs_of(llm)
    prefills: list[torch.Tensor] = []
    decodes: list[torch.Tensor] = []
    launch = runner.launch

    def recorded_launch(plan):
        handle = launch(plan)
        if handle.key is not None:
            # In stream order: a copy of what this step has computed, whatever runs after it.
            decodes.append(graphs._forward[handle.key[:2]][1].hidden[: len(plan.rows)].clone())
        return handle

    whole = runner.model.register_forward_pre_hook(lambda module, args: setattr(args[0], "logits_indices", None))
    hook = runner.model.register_forward_hook(lambda module, args, hidden: prefills.append(hidden.clone()))
    runner.launch = recorded_launch
    # Prompts run eagerly, so that the hook sees the states of all their tokens.
    graphs.can_run = lambda plan: plan.max_query_len == 1
    try:
        answers = tokens(llm.generate(prompts, params("greedy", max_tokens=16)))
    finally:
        del runner.launch, graphs.can_run
        hook.remove()
        whole.remove()
    assert [len(states) for states in prefills] == [375]
    assert [len(states) for states in decodes] == [3] * 15
    prompt_states = prefills[0].split([len(prompt) for prompt in prompts])
    with torch.inference_mode():
        ours = [
            (runner.model.head.logits(states), runner.model.head.logits(torch.stack([step[i] for step in decodes])))
            for i, states in enumerate(prompt_states)
        ]
        sequences = [torch.tensor([prompt + answer[:-1]], device="cuda") for prompt, answer in zip(prompts, answers)]
        rounded = [theirs(input_ids=ids, use_cache=False).logits[0].float() for ids in sequences]
        theirs.float()
        exact = [theirs(input_ids=ids, use_cache=False).logits[0] for ids in sequences]
    decided = 0
    for prompt, answer, parts, in_bf16, wanted in zip(prompts, answers, ours, rounded, exact):
        cut = len(prompt)
        bound = min(TOLERANCE, 2 * error(in_bf16, wanted))
        for what, got, want in zip(("prompt", "answer"), parts, (wanted[:cut], wanted[cut:])):
            found = error(got, want)
            print(f"{what} of {len(prompt)} tokens: {found:.2e}; transformers in bf16 {error(in_bf16, wanted):.2e}")
            assert found < bound, (what, len(prompt))
        best = wanted[cut - 1 :].topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > CLEAR * wanted.square().mean().sqrt()
        chosen = torch.tensor(answer, device="cuda")
        assert chosen[clear].equal(best.indices[:, 0][clear])
        decided += int(clear.sum())
    assert decided >= 12


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the norm; NaN if anything is."""
    return float((got.float() - wanted).norm() / wanted.norm())
