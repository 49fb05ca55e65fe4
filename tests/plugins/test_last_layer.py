"""The last layer goes on with the tokens that somebody asks for alone, after all have been written to the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from rapid_infer import SamplingParams
from rapid_infer.layers.batch import ForwardBatch

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "experts": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "decoder_sparse_step": 1},
    ),
    "mla": (
        "deepseek_v2",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "topk_method": "greedy",
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
        },
    ),
}
PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17, 18, 19], [21]]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_the_last_layer_goes_on_with(name, tiny, open_llm, monkeypatch):
    llm = open_llm(tiny(*MODELS[name]), block_size=4, max_num_batched_tokens=64)
    *_, before, last = llm.engine.executor.runner.model.layers
    seen: dict[str, list[int]] = {"before": [], "last": []}

    def note(where: str, layer: Any) -> None:
        forward = layer.mlp.forward

        def noted(x: Tensor, *more: Any) -> Tensor:
            seen[where].append(len(x))
            return forward(x, *more)

        monkeypatch.setattr(layer.mlp, "forward", noted)

    note("before", before)
    note("last", last)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=2))
    assert seen == {"before": [15, 3], "last": [3, 3]}
    llm.reset_prefix_cache()
    for sizes in seen.values():
        sizes.clear()
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0))
    assert seen == {"before": [15, 3], "last": [15, 3]}


def test_attention_may_leave_no_token_out(tiny, open_llm, monkeypatch):
    """Its layer then goes on with all."""
    llm = open_llm(tiny("llama"), block_size=4)
    *_, last = llm.engine.executor.runner.model.layers
    params = SamplingParams(temperature=0, max_tokens=3)
    expected = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    llm.reset_prefix_cache()
    forward, sizes = last.self_attn.forward, []

    def keep_all(x: Tensor, batch: Any) -> Tensor:
        sizes.append(len(x))
        return forward(x, replace(batch, last_layer_indices=None))

    monkeypatch.setattr(last.self_attn, "forward", keep_all)
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == expected
    assert sizes == [3, 1, 1]


def test_a_layer_that_drops_tokens_from_one_of_two_is_told(tiny, open_llm, monkeypatch):
    """With a single prompt the one token left would fit any number of others."""
    llm = open_llm(tiny("llama"), block_size=4)
    monkeypatch.setattr(ForwardBatch, "match_tokens", lambda batch, values, hidden: values)
    [output] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2))
    assert output.outputs[0].finish_reason == "error"
    assert "batch.match_tokens(residual, x) takes those of x" in (output.outputs[0].error or "")


def test_a_chunk_that_gives_no_token(tiny, open_llm):
    """Nothing of the step is asked for, and what it writes is needed all the same."""
    model = tiny("qwen3")
    whole, pieces = (open_llm(model, max_num_batched_tokens=n) for n in (64, 8))
    prompt = [(7 * n) % 97 for n in range(30)]
    tokens = [
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].token_ids
        for llm in (whole, pieces)
    ]
    assert tokens[0] == tokens[1]
