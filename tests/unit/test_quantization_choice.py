"""Which format a module gets: what configs say, what files hold, and what of both is refused."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_infer.errors import ConfigError
from rapid_infer.models.quantization import quantization_config
from rapid_infer.quant import PlainExperts, PlainMethod, StoredModules, StoredPart, select_scheme
from rapid_infer.quant.formats.fp4 import Mxfp4Format, Nvfp4Format
from rapid_infer.quant.formats.fp8 import ROWS, TENSOR, Fp8Format, blocks
from rapid_infer.quant.formats.int4 import GptqFormat

F8, BF16, U8 = torch.float8_e4m3fn, torch.bfloat16, torch.uint8
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}


def ct(weights: dict[str, Any] = WEIGHTS, targets: tuple[str, ...] = ("Linear",), **more: Any) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


@dataclass
class Header:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def part(name: str, **leaves: tuple[tuple[int, ...], torch.dtype]) -> StoredPart:
    return StoredPart(name, {leaf: Header(f"{name}.{leaf}", *what) for leaf, what in leaves.items()})


PLAIN = {"weight": ((256, 256), BF16)}
BLOCKS = {"weight": ((256, 256), F8), "weight_scale_inv": ((2, 2), torch.float32)}


def formats(config: dict[str, Any], *parts: StoredPart) -> Any:
    """Of one module made of `parts`; None where it is plain."""
    method = select_scheme(config, StoredModules({"m": parts})).method("m")
    return None if isinstance(method, PlainMethod) else method.format


@pytest.mark.parametrize(
    ("config", "leaves", "expected"),
    [
        (FP8, BLOCKS, Fp8Format(blocks(128, 128), "weight_scale_inv", dynamic="group")),
        (
            {**FP8, "scale_fmt": "ue8m0"},
            {"weight": ((256, 256), F8), "scale": ((2, 2), torch.float8_e8m0fnu)},
            Fp8Format(blocks(128, 128), "scale", dynamic="group", exponents=True),
        ),
        # One block is no scalar, and a scalar no block.
        (
            FP8,
            {"weight": ((64, 96), F8), "weight_scale_inv": ((1, 1), torch.float32)},
            Fp8Format(blocks(128, 128), "weight_scale_inv", dynamic="group"),
        ),
        (
            FP8,
            {"weight": ((256, 256), F8), "weight_scale": ((), torch.float32)},
            Fp8Format(TENSOR, "weight_scale"),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            {"weight": ((256, 256), F8), "weight_scale": ((1,), BF16), "input_scale": ((1,), torch.float32)},
            Fp8Format(TENSOR, "weight_scale", "input_scale"),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic"},
            {"weight": ((256, 256), F8), "weight_scale": ((256, 1), torch.float32)},
            Fp8Format(ROWS, "weight_scale"),
        ),
        (
            {**FP8, "expert_dtype": "fp4"},
            {"weight": ((256, 128), torch.int8), "scale": ((256, 8), torch.float8_e8m0fnu)},
            Mxfp4Format("weight", "scale"),
        ),
        ({**GPTQ, "checkpoint_format": "gptq_v2"}, {"qweight": ((32, 256), torch.int32)}, GptqFormat(128, offset=0)),
        (
            {**GPTQ, "group_size": -1},
            {"qweight": ((32, 256), torch.int32), "g_idx": ((256,), torch.int32)},
            GptqFormat(None),
        ),
        (
            {**GPTQ, "dynamic": {r"+:.*\.x$": {"group_size": 64}, r"+:.*": {"group_size": 32}}},
            {"qweight": ((32, 256), torch.int32), "scales": ((4, 256), BF16)},
            GptqFormat(64, scale_dtype=torch.float32),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": []},
            {"weight": ((256, 128), U8), "weight_scale": ((256, 16), F8), "pre_quant_scale": ((256,), BF16)},
            Nvfp4Format(multiplier=True),
        ),
        (
            {
                "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"model.x": {"quant_algo": "FP8"}, "model.y": {"quant_algo": "NVFP4"}},
            },
            {"weight": ((256, 256), F8), "weight_scale": ((), torch.float32), "input_scale": ((), torch.float32)},
            Fp8Format(TENSOR, input_scale="input_scale"),
        ),
    ],
)  # fmt: skip
def test_formats(config: dict[str, Any], leaves: dict[str, Any], expected: Any) -> None:
    assert formats(config, part("model.x", **leaves)) == expected


@pytest.mark.parametrize(
    ("config", "plain", "quantized"),
    [
        (FP8, ["lm_head"], ["model.layers.0.mlp.down_proj", "model.lm_heads"]),
        ({**FP8, "modules_to_not_convert": ["mlp.gate", "model.layers.1"]},
         ["model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj"],
         ["model.layers.0.mlp.gate_proj", "model.layers.10.x"]),
        (GPTQ, ["lm_head"], ["model.layers.0.x"]),
        ({**GPTQ, "lm_head": True}, [], ["lm_head"]),
        ({**GPTQ, "dynamic": {r"-:.*\.down_proj": {}}},
         ["model.layers.0.mlp.down_proj"], ["model.layers.0.mlp.up_proj"]),
        ({**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj"]]},
         ["model.layers.0.mlp.up_proj"], ["model.layers.0.self_attn.q_proj"]),
        ({**AWQ, "modules_to_not_convert": ["visual"]}, ["visual.x", "lm_head"], ["model.visualize.x"]),
        (ct(ignore=["lm_head", r"re:.*\.gate$"]),
         ["lm_head", "model.mlp.gate"], ["model.lm_head2", "model.mlp.gate_proj"]),
        (ct(targets=(r"re:.*\.q_proj", "model.a.b")), ["model.k_proj", "model.a.b.c"], ["model.q_proj", "model.a.b"]),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]},
         ["lm_head", "model.layers.3.self_attn.q_proj"], ["model.layers.3.mlp.up_proj"]),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
         ["model.layers.0.self_attn.q_proj", "lm_head"], ["model.layers.0.mlp.experts.gate_up_proj"]),
    ],
)  # fmt: skip
def test_configs_name_what_stays_plain(config: dict[str, Any], plain: list[str], quantized: list[str]) -> None:
    """Where there are no files to look at."""
    scheme = select_scheme(config, StoredModules(sources=lambda module: (module,)))
    assert [name for name in (*plain, *quantized) if isinstance(scheme.method(name), PlainMethod)] == plain


def test_files_count_more_than_the_config(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert formats({**FP8, "modules_to_not_convert": ["model.x"]}, part("model.x", **BLOCKS)) is not None
    assert "model.x and what is like it is quantized in the files, unlike in the config" in caplog.text
    assert formats(FP8, part("model.x", **PLAIN)) is None
    assert "model.x and what is like it is not quantized in the files" in caplog.text
    # Scales of the cache do not make a matrix a quantized one.
    assert formats(FP8, part("model.k", **PLAIN, k_scale=((), torch.float32))) is None
    caplog.clear()
    assert formats(FP8, part("model.x", **BLOCKS)) is not None
    assert not caplog.text


def test_parts_that_are_stored_unlike() -> None:
    with pytest.raises(
        ConfigError, match=r"m is one matrix of 3 .*\(quantized: model\.q and 1 more; not quantized: model\.k\)"
    ):
        formats(FP8, part("model.q", **BLOCKS), part("model.k", **PLAIN), part("model.v", **BLOCKS))
    rule = {"dynamic": {r"+:.*\.v": {"group_size": 64}}}
    packed = {"qweight": ((32, 256), torch.int32)}
    with pytest.raises(ConfigError, match=r"group=128.*model\.q; .*group=64.*model\.v"):
        formats({**GPTQ, **rule}, part("model.q", **packed), part("model.v", **packed))


def test_experts_and_what_is_not_there() -> None:
    modules = {
        "e.gate_up_proj": (part("a.experts.0.up_proj", **BLOCKS),),
        "e.down_proj": (part("a.experts.0.d", **PLAIN),),
    }
    scheme = select_scheme(FP8, StoredModules(modules))
    with pytest.raises(ConfigError, match="e is one matrix of 2"):
        scheme.experts("e")
    assert isinstance(scheme.experts("other"), PlainExperts)


SUPPORTED = "which is not supported: expected"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "quark"}, "quant_method='quark'.*supported: none .*fp8.*compressed-tensors.*mxfp4"),
        ({**FP8, "fmt": "e5m2"}, f"quantization_config has fmt='e5m2', {SUPPORTED} 'e4m3'"),
        ({**FP8, "activation_scheme": "static"}, "'dynamic' with weight_block_size"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size=\[128\], .*\[128, 128\]"),
        ({**FP8, "expert_dtype": "int4"}, "expert_dtype='int4'"),
        ({**GPTQ, "bits": 3}, f"bits=3, {SUPPORTED} 4"),
        ({**GPTQ, "group_size": 0}, "group_size=0, .*a positive number of inputs, or -1"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin', .*'gptq' or 'gptq_v2'"),
        ({**GPTQ, "dynamic": {"*:x": {}}}, "dynamic=.*'-:regex'"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, r"dynamic rule '-:\('"),
        ({**AWQ, "version": "marlin"}, "version='marlin', .*'gemm'"),
        ({**AWQ, "group_size": None}, "group_size=None"),
        (ct(sparsity_config={"format": "sparse-24"}), "sparsity_config=.*not sparse"),
        (ct(transform_config={"config_groups": {"R1": {}}}), "transform_config=.*not rotated"),
        (ct({**WEIGHTS, "type": "int"}), "config_groups.group_0.weights has num_bits=8, .*4 with type 'int'"),
        (ct({**WEIGHTS, "strategy": "attn_head"}), "strategy='attn_head'"),
        (ct({**WEIGHTS, "num_bits": 4, "type": "int"}, format="int-quantized"), "='int-quantized'.*'pack-quantized'"),
        (ct(ignore=["re:("]), r"target '\('"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "a group of linear layers"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}, "quant_algo='NVFP4_SVD', .*'nvfp4'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, f"group_size=32, {SUPPORTED} 16"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers=None"),
    ],
)  # fmt: skip
def test_refusals_name_field_value_and_what_works(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        select_scheme(config, StoredModules())
    assert "\n" not in str(caught.value)


def test_where_a_checkpoint_says_it(tmp_path: Path) -> None:
    def found(config: dict[str, Any], **files: Any) -> Any:
        for file in tmp_path.iterdir():
            file.unlink()
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return quantization_config(tmp_path, [config])

    modelopt = {"producer": {}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    assert found({}) is None
    assert found({"compression_config": {"format": "x"}}) == {"format": "x", "quant_method": "compressed-tensors"}
    assert found({}, hf_quant_config=modelopt)["quant_method"] == "modelopt"
    assert found({}, quantize_config={"bits": 4}) == {"bits": 4, "quant_method": "gptq"}
    assert found({}, quant_config={"w_bit": 4})["quant_method"] == "awq"
    both = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert found(both, quantize_config={"bits": 8})["bits"] == 4
    with pytest.raises(
        ConfigError, match=r"in config.json that it is quantized with gptq, and in quant_config.json with awq"
    ):
        found(both, quant_config={"w_bit": 4})
    converted = {"quantization_config": {"quant_algo": "NVFP4", "ignore": []}}
    with pytest.raises(ConfigError, match=r"with modelopt NVFP4, and in hf_quant_config.json with modelopt FP8"):
        found(converted, hf_quant_config=modelopt)
    with pytest.raises(ConfigError, match="expected a JSON object"):
        found({"quantization_config": "fp8"})
