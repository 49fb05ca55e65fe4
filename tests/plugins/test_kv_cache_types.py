"""Models with a KV cache in FP8 or NVFP4: however a prompt is cut, from the cache or again, and the files' scales."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from mla_sizes import MLA
from safetensors.torch import load_file, save_file
from torch import Tensor

from rapid_infer import SamplingParams
from rapid_infer.config import EngineArgs
from rapid_infer.errors import ConfigError, WeightError
from rapid_infer.layers.attention import Attention
from rapid_infer.loader.inventory import Inventory
from rapid_infer.loader.load import load_weights
from rapid_infer.loader.plan import LoadPlan, plan_load
from rapid_infer.parallel import ParallelState
from rapid_infer.startup import configure, locate
from rapid_infer.testing import record_logits
from rapid_infer.worker import build

DENSE = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}
WINDOW = {
    "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "use_sliding_window": True,
    "sliding_window": 20, "max_window_layers": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", DENSE), "window": ("qwen3", WINDOW), "mla": ("deepseek_v2", MLA),
}  # fmt: skip
STORED = [("dense", "fp8"), ("dense", "nvfp4"), ("dense", "bf16"), ("window", "fp8"), ("mla", "fp8"), ("mla", "bf16")]
PROMPTS = [[(7 * i + 3) % 90 + 5 for i in range(70)], [11, 12, 13, 50, 51, 8, 9, 30, 31]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def run(llm: Any, prompts: list[list[int]] = PROMPTS) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens and logits of each prompt, one after another."""
    tokens, logits = [], []
    for prompt in prompts:
        with record_logits(llm) as recorded:
            [output] = llm.generate([prompt], GREEDY)
        tokens.append(list(output.outputs[0].token_ids))
        logits.append(torch.cat(recorded))
    return tokens, logits


@pytest.mark.parametrize(("model", "stored"), STORED)
def test_chunks_equal_the_whole(model: str, stored: str, tiny: Any, open_llm: Any) -> None:
    """Attention sees what is stored, also of the step's own tokens."""
    checkpoint = tiny(*MODELS[model])
    options = {"kv_cache_dtype": stored, "enable_prefix_caching": False}
    tokens, logits = run(open_llm(checkpoint, **options))
    plain, _ = run(open_llm(checkpoint)) if stored == "nvfp4" else (None, None)
    assert tokens != plain
    for chunk in (1, 7, 64):
        cut_tokens, cut_logits = run(open_llm(checkpoint, max_num_batched_tokens=chunk, **options))
        assert cut_tokens == tokens
        for got, expected in zip(cut_logits, logits):
            # The last ones are of the last prompt token and those generated.
            error = (got[-6:] - expected[-6:]).abs().max() / expected.abs().max()
            # A last bit that sums in another order leave may round the other way, which is little in bf16.
            assert error < (1e-3 if stored == "bf16" else 2e-5)


@pytest.mark.parametrize(("model", "stored"), [("dense", "fp8"), ("dense", "nvfp4"), ("mla", "fp8")])
def test_cached_prefixes_and_preempted_requests_equal_others(model: str, stored: str, tiny: Any, open_llm: Any) -> None:
    checkpoint, options = tiny(*MODELS[model]), {"kv_cache_dtype": stored, "block_size": 4}
    llm = open_llm(checkpoint, **options)
    prompts = [[*PROMPTS[0][:40], n, n + 1] for n in (5, 9, 60)]
    expected = [list(llm.generate([prompt], GREEDY)[0].outputs[0].token_ids) for prompt in prompts]
    again = llm.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in again] == expected
    assert min(output.num_cached_tokens for output in again) >= 40
    page = sum(group.page_bytes(4) for group in build.cache_groups(llm.engine.executor.built.model))
    small = open_llm(
        checkpoint, **options, max_model_len=64, kv_cache_memory_bytes=24 * page, enable_prefix_caching=False
    )
    outputs = small.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert small.engine.core.scheduler.stats.preemptions > 0


def test_blocks_double(tiny: Any, open_llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    counts = {}
    for stored in ("bf16", "fp8"):
        llm = open_llm(tiny(*MODELS["dense"]), kv_cache_dtype=stored, kv_cache_memory_bytes=1 << 20)
        [counts[stored]] = [pool.num_blocks for pool in llm.engine.core.cache.pools]
    assert counts["fp8"] == 2 * counts["bf16"]
    assert "bytes/token in float8_e4m3fn" in caplog.text


def with_scales(path: Path, folder: Path, scales: Mapping[str, Tensor]) -> Path:
    """The checkpoint with tensors of these names below each layer's attention."""
    made = shutil.copytree(path, folder)
    tensors = load_file(made / "model.safetensors")
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    tensors |= {f"model.layers.{n}.self_attn.{name}": value.clone() for n in layers for name, value in scales.items()}
    save_file(tensors, made / "model.safetensors")
    return made


def plan_of(path: Path, rank: int = 0, ranks: int = 1) -> tuple[Any, LoadPlan]:
    """The model with its weights, and the plan they were loaded by."""
    args = EngineArgs(device="cpu", dtype="float32", kv_cache_dtype="fp8", tensor_parallel_size=ranks)
    checkpoint, entry = locate(str(path), args)
    found = configure(checkpoint, entry, args)
    parallel = ParallelState(rank, ranks)
    model = build.build_model(found.cls, checkpoint, found.config, "cpu", found.model_config, parallel).model
    plan = plan_load(model, model.weight_map, Inventory.scan(path))
    load_weights(model, model.weight_map, path)
    return model, plan


def scales_of(model: Any) -> list[list[list[float]]]:
    return [module.kv_scales.tolist() for module in model.modules() if isinstance(module, Attention)]


K, V = torch.tensor(0.25), torch.tensor([0.5])
SPELLINGS: dict[str, dict[str, Tensor]] = {
    "attention": {"k_scale": K, "v_scale": V, "q_scale": V, "prob_scale": V},
    "projections": {"k_proj.k_scale": K, "v_proj.v_scale": V},
    "merged": {"qkv_proj.k_scale": K, "qkv_proj.v_scale": V},
    "inner": {"attn.k_scale": K, "attn.v_scale": V},
    "outputs": {"k_proj.output_scale": K, "v_proj.output_scale": V, "q_proj.output_scale": V, "o_proj.output_scale": K},
    "16 bit": {"k_scale": K.bfloat16(), "v_scale": V.bfloat16()},
    "1x1x1": {"k_scale": K.view(1, 1, 1), "v_scale": V.view(1, 1)},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_are_found_by_all_their_names(
    spelling: str, tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, plan = plan_of(with_scales(tiny(*MODELS["dense"]).path, tmp_path / "m", SPELLINGS[spelling]))
    assert scales_of(model) == [[[0.25, 0.25], [0.5, 0.5]]] * 2
    assert not plan.unscaled
    assert "1.0 is used" not in caplog.text
    unused = ("q_scale", "prob_scale", "q_proj.output_scale", "o_proj.output_scale")
    assert len(plan.ignored) == 2 * sum(name in unused for name in SPELLINGS[spelling])


def test_one_scale_for_both(tiny: Any, tmp_path: Path) -> None:
    model, _ = plan_of(with_scales(tiny(*MODELS["dense"]).path, tmp_path / "m", {"kv_scale": K}))
    assert scales_of(model) == [[[0.25, 0.25], [0.25, 0.25]]] * 2


def test_scales_of_heads_are_cut_and_repeated_as_heads_are(tiny: Any, tmp_path: Path) -> None:
    scales = {"k_scale": torch.tensor([0.1, 0.2]), "v_scale": torch.tensor([0.3, 0.4]).view(2, 1, 1)}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = with_scales(tiny("llama", sizes).path, tmp_path / "m", scales)
    for ranks, heads in ((1, [[0, 1]]), (2, [[0], [1]]), (4, [[0], [0], [1], [1]])):
        for rank, mine in enumerate(heads):
            model, _ = plan_of(path, rank, ranks)
            wanted = torch.tensor([[0.1, 0.2], [0.3, 0.4]])[:, mine]
            assert scales_of(model) == [wanted.tolist()] * 2


def test_without_scales_one_warning(tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = with_scales(tiny(*MODELS["dense"]).path, tmp_path / "m", {"v_scale": V})
    model, _ = plan_of(path)
    assert scales_of(model) == [[[1, 1], [0.5, 0.5]]] * 2
    warnings = [record.getMessage() for record in caplog.records if "1.0 is used" in record.getMessage()]
    assert len(warnings) == 1
    assert "of 2 layers, such as layers.0.self_attn.attn" in warnings[0]


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.tensor(-1.0), "v_scale": V}, r"self_attn.k_scale: got -1 at .*finite and above zero"),
        ({"k_scale": torch.tensor(torch.inf), "v_scale": V}, "self_attn.k_scale: got inf"),
        (
            {"k_scale": torch.ones(3), "v_scale": V},
            r"k_scale \(2\): checkpoint \[3\], expected one scale",
        ),
        ({"k_scale": K, "k_proj.output_scale": K, "v_scale": V}, "says already what the keys of layers.N.self_attn"),
    ],
)
def test_scales_that_cannot_be_are_refused(scales: dict[str, Tensor], message: str, tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=message):
        plan_of(with_scales(tiny(*MODELS["dense"]).path, tmp_path / "m", scales))


def test_scales_make_far_values_exact(tiny: Any, tmp_path: Path, open_llm: Any) -> None:
    """Values 1e5 times as large, and an output projection that takes it back."""
    path = shutil.copytree(tiny(*MODELS["dense"]).path, tmp_path / "large")
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        tensor *= 1e5 if "v_proj" in name else 1e-5 if "o_proj" in name else 1
    save_file(tensors, path / "model.safetensors")
    exact = run(open_llm(path))[1]
    scaled = with_scales(path, tmp_path / "scaled", {"k_scale": torch.tensor(0.1), "v_scale": torch.tensor(1e3)})
    errors = []
    for checkpoint in (path, scaled):
        got = run(open_llm(checkpoint, kv_cache_dtype="fp8"))[1]
        errors.append(max(float((a[0] - b[0]).norm() / b[0].norm()) for a, b in zip(got, exact)))
    assert errors[1] < 0.25 < 1 < errors[0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp8_e5m2", r"kv_cache_dtype must be 'fp8', which is e4m3.*, got 'fp8_e5m2'"),
        ("int8", r"kv_cache_dtype must be one of \['auto', 'bf16', 'fp8', 'nvfp4'\], got 'int8'"),
    ],
)
def test_other_types_are_refused(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(kv_cache_dtype=value)


def test_latents_have_no_nvfp4(tiny: Any, open_llm: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='nvfp4' has no form for latents; use 'fp8' or 'auto'"):
        open_llm(tiny(*MODELS["mla"]), kv_cache_dtype="nvfp4")
