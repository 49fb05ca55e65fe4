"""Quantized checkpoints of every format that is read: the same logits as of the values they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mla_sizes import MLA
from packers import script
from safetensors.torch import load_file, save_file

from rapid_infer import ModelRegistry, SamplingParams
from rapid_infer.config import EngineArgs
from rapid_infer.errors import ConfigError, WeightError
from rapid_infer.loader.load import finalize
from rapid_infer.models.checkpoint import read_checkpoint
from rapid_infer.ops import OPS, QuantizedMatrix
from rapid_infer.ops.quantizers import quantize_fp8, quantize_mxfp4, quantize_nvfp4
from rapid_infer.startup import configure
from rapid_infer.testing import record_logits
from rapid_infer.worker import build

PROMPTS = [[5, 6, 7, 8, 9, 30, 31, 77], [11, 12, 13]]
# Parts of unlike sizes, blocks of 128 that are cut short in both directions.
DENSE = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2}
MOE = {
    "hidden_size": 192, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
    "mlp_only_layers": [0],
}  # fmt: skip
MODELS = {"dense": ("llama", DENSE), "moe": ("qwen3_moe", MOE), "mla": ("deepseek_v2", MLA)}
EXPERTS_ONLY = {"mxfp4-experts", "fp8-fp4-experts"}
NO_EXPERTS = {"gptq-act-order", "ct-int4-act-order", "modelopt-nvfp4-awq"}
ONLINE: dict[str, Callable[[torch.Tensor], QuantizedMatrix]] = {
    "fp8": lambda w: quantize_fp8(w, *w.shape),
    "fp8_row": lambda w: quantize_fp8(w, 1, w.shape[1]),
    "fp8_block": lambda w: quantize_fp8(w, 128, 128),
    "nvfp4": quantize_nvfp4,
    "mxfp4": quantize_mxfp4,
}
CASES = [
    (model, name)
    for name in script.TARGETS
    for model in MODELS
    if not (model == "dense" and name in EXPERTS_ONLY) and not (model != "dense" and name in NO_EXPERTS)
]


def logits(llm: Any) -> torch.Tensor:
    with record_logits(llm) as recorded:
        for prompt in PROMPTS:
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    return torch.cat(recorded)


@pytest.mark.parametrize(("model", "name"), CASES)
def test_logits_are_those_of_the_dequantized_model(
    model: str, name: str, tiny: Any, open_llm: Any, tmp_path: Path
) -> None:
    kind, sizes = MODELS[model]
    quantized, plain = script.quantize_checkpoint(tiny(kind, sizes).path, tmp_path, name)
    llm = open_llm(quantized)
    got, expected = logits(llm), logits(open_llm(plain))
    assert expected.abs().max() > 1
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    counts = llm.engine.executor.built.ops.counts()
    ran = {op.partition("=")[0] for op, count in counts.items() if count}
    assert ("quantized_linear" in ran) == (name != "mxfp4-experts")
    assert ("quantized_experts" in ran) == (model != "dense")
    # All experts are multiplied quantized or none.
    assert "fused_experts" not in ran


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ONLINE)
def test_weights_are_rounded_while_they_are_loaded(
    model: str, name: str, tiny: Any, open_llm: Any, tmp_path: Path
) -> None:
    """Each tensor of the checkpoint for itself, but those of the head, the router and the latent's up-projection."""
    source = tiny(*MODELS[model]).path
    shutil.copytree(source, tmp_path / "plain")
    tensors = load_file(source / "model.safetensors")
    for tensor, value in tensors.items():
        if value.ndim == 2 and not re.search(r"embed|lm_head|mlp\.gate\.|kv_b_proj", tensor):
            tensors[tensor] = OPS["dequantize"].reference(ONLINE[name](value), torch.float32)
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    llm = open_llm(source, quantization=name)
    got, expected = logits(llm), logits(open_llm(tmp_path / "plain"))
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    runner = llm.engine.executor.runner
    layers = [module for module in runner.model.modules() if hasattr(module, "quant_kind")]
    assert len(layers) == {"dense": 8, "moe": 8, "mla": 12}[model]
    # Nothing is left of what was read.
    assert all(param.numel() == 0 for layer in layers for param in layer.parameters())


@pytest.mark.parametrize("name", [*ONLINE, *(name for name in script.TARGETS if name not in EXPERTS_ONLY)])
def test_dummy_weights_have_the_usual_spread(name: str, tiny: Any, tmp_path: Path) -> None:
    checkpoint = tiny(*MODELS["dense"]).path
    options: dict[str, Any] = {"load_format": "dummy"}
    if name in ONLINE:
        options["quantization"] = name
    else:
        target = script.TARGETS[name]
        # No weights: the config alone decides.
        config = json.loads((checkpoint / "config.json").read_text())
        declared = {} if target.side_file else {"quantization_config": target.config}
        (tmp_path / "config.json").write_text(json.dumps({**config, **declared}))
        if target.side_file:
            (tmp_path / target.side_file).write_text(json.dumps(target.config))
        checkpoint = tmp_path
    built = built_model(checkpoint, **options)
    for layer in ("layers.0.self_attn.qkv_proj", "layers.1.mlp.down_proj"):
        linear = built.get_submodule(layer)
        weight = OPS["dequantize"].reference(linear.quant.converted.matrix, torch.float32)
        assert weight.std().item() == pytest.approx(0.02, rel=0.12)
        assert abs(weight.mean()) < 0.001
    assert built.head.weight.numel()


def built_model(path: Path, on: str = "cpu", **options: Any) -> Any:
    checkpoint = read_checkpoint(path)
    entry = ModelRegistry.lookup(checkpoint.architecture)
    args = EngineArgs(device="cpu", dtype="float32", **options)
    model = configure(checkpoint, entry, args)
    with torch.inference_mode():
        built = build.build_model(model.cls, checkpoint, model.config, on, model.model_config)
        if on == "meta":
            finalize(built.model)
        else:
            build.load(built, checkpoint, model.config)
    return built.model


LAYER = "model.layers.0.self_attn."
BAD_TENSORS: list[tuple[str, str, Any, str]] = [
    ("fp8-block", f"{LAYER}q_proj.weight_scale_inv", lambda t: t.index_fill(0, torch.tensor(1), -1.0),
     r"tensor {name}: got -1 at \[1, 0\]: a scale must be finite and not negative"),
    ("fp8", f"{LAYER}k_proj.weight_scale_inv", lambda t: t * torch.inf, r"tensor {name}: got inf at \[\]: a scale"),
    ("ct-fp8-dynamic", f"{LAYER}o_proj.weight_scale", lambda t: t * torch.nan, r"{name}: got nan at \[0, 0\]"),
    ("ct-mxfp8", f"{LAYER}v_proj.weight_scale", lambda t: torch.full_like(t, 255),
     r"{name}: got 255 at \[0, 0\]: e8m0 byte 255, which is no number"),
    ("fp8-static", f"{LAYER}q_proj.input_scale", torch.zeros_like, r"{name}: got 0 at \[\]: .* above zero"),
    ("ct-nvfp4", f"{LAYER}q_proj.weight_global_scale", torch.zeros_like, r"{name}: got 0 at \[0\]: .* above zero"),
    ("gptq", f"{LAYER}q_proj.scales", lambda t: -t, r"{name}: got -0\.\d+ at \[0, 0\]"),
    ("fp8-block", f"{LAYER}q_proj.weight_scale_inv", None, "qkv_proj.weight_scale_inv: lacks q"),
    ("fp8-block", f"{LAYER}o_proj.weight_scale_inv", None, "o_proj.weight_scale_inv"),
    ("fp8-static", f"{LAYER}o_proj.input_scale", None, "o_proj.input_scale"),
    ("fp8-block", f"{LAYER}o_proj.weight_scale_inv", lambda t: t[:1], r"checkpoint \[1, 2\], model \[2, 2\] for .*o_"),
    ("fp8", f"{LAYER}q_proj.weight", lambda t: t.float().to(torch.float8_e5m2),
     "checkpoint float8_e5m2, model float8_e4m3fn for .*qkv_proj.weight"),
    ("gptq", f"{LAYER}o_proj.weight_foo", lambda _: torch.zeros(2), "RowParallelLinear has no parameter weight_foo"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "change", "message"), BAD_TENSORS)
def test_bad_tensors_are_named(
    name: str, tensor: str, change: Any, message: str, tiny: Any, tmp_path: Path, open_llm: Any
) -> None:
    quantized, _ = script.quantize_checkpoint(tiny(*MODELS["dense"]).path, tmp_path, name)
    tensors = load_file(quantized / "model.safetensors")
    if change is None:
        del tensors[tensor]
    else:
        tensors[tensor] = change(tensors.get(tensor)).contiguous()
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(WeightError, match=message.replace("{name}", re.escape(tensor))):
        open_llm(quantized)


def test_one_part_that_is_not_quantized(tiny: Any, tmp_path: Path, open_llm: Any) -> None:
    quantized, plain = script.quantize_checkpoint(tiny(*MODELS["dense"]).path, tmp_path, "fp8-block")
    tensors, name = load_file(quantized / "model.safetensors"), f"{LAYER}k_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = load_file(plain / "model.safetensors")[name]
    save_file(tensors, quantized / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"qkv_proj is one matrix of 3 .*not quantized: model.layers.0.self_attn.k_proj; q"
    ):
        open_llm(quantized)


def test_a_quantized_checkpoint_is_not_rounded_again(tiny: Any, tmp_path: Path, open_llm: Any) -> None:
    quantized, _ = script.quantize_checkpoint(tiny(*MODELS["dense"]).path, tmp_path, "gptq")
    with pytest.raises(ConfigError, match=r"quantization='fp8' is for 16-bit checkpoints.*quant_method='gptq'"):
        open_llm(quantized, quantization="fp8")


def test_scales_of_a_quantized_cache_are_told(
    tiny: Any, tmp_path: Path, open_llm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, _ = script.quantize_checkpoint(tiny(*MODELS["dense"]).path, tmp_path, "ct-fp8-static")
    caplog.set_level("INFO")
    open_llm(quantized)
    told = [record.message for record in caplog.records if "k_scale" in record.message]
    assert len(told) == 1
    assert "2 scales, such as model.layers.0.self_attn.k_scale, are not used" in told[0]


@pytest.mark.parametrize("model", MODELS)
def test_matrices_without_memory_have_the_same_shapes(model: str, tiny: Any, tmp_path: Path) -> None:
    """Kernels are compiled for what a model on the meta device launches."""
    for name in ("fp8-block", "gptq-v2-zeros", "awq", "ct-nvfp4", "mxfp4-experts" if model != "dense" else "ct-mxfp4"):
        checkpoint, _ = script.quantize_checkpoint(tiny(*MODELS[model]).path, tmp_path / name, name)
        loaded, empty = built_model(checkpoint), built_model(checkpoint, on="meta")
        modules = dict(empty.named_modules())
        for path, module in loaded.named_modules():
            kind = getattr(module, "quant_kind", None)
            assert kind == getattr(modules[path], "quant_kind", None), (name, path)
            for mine, other in zip(_matrices(module), _matrices(modules[path]), strict=True):
                for part in ("values", "scale", "zero", "row_scale"):
                    one, two = getattr(mine, part), getattr(other, part)
                    assert (one is None) == (two is None)
                    assert one is None or (one.shape, one.dtype, one.stride()) == (two.shape, two.dtype, two.stride())


def _matrices(module: Any) -> list[QuantizedMatrix]:
    quant = getattr(module, "quant", None)
    if hasattr(quant, "gate_up"):
        return [quant.gate_up, quant.down]
    return [quant.converted.matrix] if hasattr(quant, "converted") else []
