#!/usr/bin/env python3
"""Writes a 16-bit checkpoint in a quantized format that others publish, and beside it the same values unquantized.

    python scripts/quantize_checkpoint.py MODEL_DIR OUT_DIR --format gptq

makes OUT_DIR/quantized and OUT_DIR/plain. Round to nearest, for tests: published checkpoints are made with more care.
Shares no code with the readers in rapid_infer/quant, which are tested with what this writes.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Leaves = dict[str, Tensor]
Pack = Callable[[Tensor, str], tuple[Leaves, Tensor]]
"""(weight fp32 [out, in], its name) -> (leaves by name, the matrix they stand for)."""


@dataclass(frozen=True)
class Target:
    """`config` goes into config.json as quantization_config, or into `side_file`. `head`: the head is packed too.

    `fuse`: the experts' packed tensors become one, by (parts of a layer's experts) -> tensors.
    """

    pack: Pack
    config: Mapping[str, Any]
    side_file: str | None = None
    head: bool = False
    skip: str = r"embed|\.mlp\.gate\.weight|shared_expert_gate"
    only: str = ""
    fuse: bool = False
    extra: Mapping[str, Tensor] = field(default_factory=dict)


def e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def spread(scale: Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> Tensor:
    """One scale for each entry of `shape`."""
    out, inputs = shape
    return scale[torch.arange(out)[:, None] // rows, torch.arange(inputs)[None, :] // columns]


def block_amax(weight: Tensor, rows: int, columns: int) -> Tensor:
    blocks = torch.nn.functional.max_pool2d(weight.abs()[None, None], (rows, columns), ceil_mode=True)
    return blocks[0, 0].clamp(min=1e-6)


def fp8(rows: int | None, columns: int | None, *, scale: str, style: str = "float", inputs: str | None = None) -> Pack:
    """`style`: float, bf16, power (fp32 powers of two), bytes (e8m0), uint8 (the same by another name)."""

    def pack(weight: Tensor, name: str) -> tuple[Leaves, Tensor]:
        r, c = rows or weight.shape[0], columns or weight.shape[1]
        scales = block_amax(weight, r, c) / 448
        if style == "bf16":
            scales = scales.bfloat16().float()
        elif style != "float":
            scales = torch.exp2(scales.log2().ceil())
        codes = e4m3(weight / spread(scales, r, c, weight.shape))
        dense = codes.float() * spread(scales, r, c, weight.shape)
        stored = scales.reshape(()) if rows is None else scales
        if style in ("bytes", "uint8"):
            stored = (stored.log2() + 127).round().to(torch.uint8)
            stored = stored.view(torch.float8_e8m0fnu) if style == "bytes" else stored
        elif style == "bf16":
            stored = stored.bfloat16()
        leaves = {"weight": codes, scale: stored}
        if inputs is not None:
            leaves[inputs] = torch.tensor(0.01 + 0.001 * (len(name) % 7))
        return leaves, dense

    return pack


def words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 of eight 4-bit values along the last dimension; `order[i]` is the value in bits 4i to 4i + 3."""
    array = values.numpy().astype(np.uint32)
    array = np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % 8)])
    out = np.zeros((*array.shape[:-1], array.shape[-1] // 8), np.uint32)
    for place, member in enumerate(order):
        out |= array[..., member::8] << np.uint32(4 * place)
    return torch.from_numpy(out.view(np.int32).copy())


def int4(
    weight: Tensor, group: int, symmetric: bool, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [out, in], zeros [out, groups], scales fp16 [out, groups], dense); `order`: the group of each input."""
    out, inputs = weight.shape
    groups = torch.arange(inputs) // group if order is None else order
    count = int(groups.max()) + 1
    codes, dense = torch.zeros_like(weight), torch.zeros_like(weight)
    zeros, scales = torch.zeros(out, count), torch.zeros(out, count)
    for g in range(count):
        mine = groups == g
        block = weight[:, mine]
        low, high = block.amin(1).clamp(max=0), block.amax(1).clamp(min=0)
        scale = (block.abs().amax(1) / 7 if symmetric else (high - low) / 15).clamp(min=1e-4).half().float()
        zero = torch.full((out,), 8.0) if symmetric else (-low / scale).round().clamp(1, 15)
        code = (block / scale[:, None] + zero[:, None]).round().clamp(0, 15)
        codes[:, mine], zeros[:, g], scales[:, g] = code, zero, scale
        dense[:, mine] = (code - zero[:, None]) * scale[:, None]
    return codes.to(torch.uint8), zeros.to(torch.uint8), scales.half(), dense


def gptq(group: int, symmetric: bool, version: int, act_order: bool = False, plain: str | None = None) -> Pack:
    def pack(weight: Tensor, name: str) -> tuple[Leaves, Tensor]:
        inputs = weight.shape[1]
        g = inputs if group == -1 else group
        order = torch.arange(inputs) // g
        if act_order:
            # Layers with one input have one order.
            order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        codes, zeros, scales, dense = int4(weight, g, symmetric, order)
        stored = zeros - 1 if version == 1 else zeros
        return {
            "qweight": words(codes).T.contiguous(),
            "qzeros": words(stored.T.contiguous()),
            "scales": scales.T.contiguous(),
            "g_idx": order.to(torch.int32),
        }, dense

    return pack


def awq(group: int) -> Pack:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(weight: Tensor, name: str) -> tuple[Leaves, Tensor]:
        codes, zeros, scales, dense = int4(weight, group, symmetric=False)
        return {
            "qweight": words(codes.T.contiguous(), order),
            "qzeros": words(zeros.T.contiguous(), order),
            "scales": scales.T.contiguous(),
        }, dense

    return pack


def packed(group: int, symmetric: bool, act_order: bool = False) -> Pack:
    def pack(weight: Tensor, name: str) -> tuple[Leaves, Tensor]:
        inputs = weight.shape[1]
        g = inputs if group == -1 else group
        order = torch.arange(inputs) // g
        if act_order:
            order = order[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
        codes, zeros, scales, dense = int4(weight, g, symmetric, order)
        leaves = {"weight_packed": words(codes), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
        if not symmetric:
            leaves["weight_zero_point"] = words(zeros.T.contiguous()).T.contiguous()
        if act_order:
            leaves["weight_g_idx"] = order.to(torch.int32)
        return leaves, dense

    return pack


def nearest_e2m1(values: Tensor) -> Tensor:
    """Codes, by distance to each of the sixteen values."""
    return (values.unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)


def pairs(codes: Tensor) -> Tensor:
    return codes[..., 0::2] + 16 * codes[..., 1::2]


def nvfp4(compressed: bool, multiplier: bool = False) -> Pack:
    def pack(weight: Tensor, name: str) -> tuple[Leaves, Tensor]:
        outer = weight.abs().max() / (6 * 448)
        scales = e4m3(block_amax(weight, 1, 16) / 6 / outer)
        each = spread(scales.float(), 1, 16, weight.shape) * outer
        codes = nearest_e2m1(weight / each.clamp(min=1e-12))
        dense = E2M1[codes.int()] * each
        if compressed:
            leaves = {"weight_packed": pairs(codes), "weight_scale": scales}
            divisor = (1 / outer).reshape(1)
            dense = E2M1[codes.int()] * spread(scales.float(), 1, 16, weight.shape) / divisor
            return leaves | {"weight_global_scale": divisor, "input_global_scale": torch.ones(1)}, dense
        leaves = {
            "weight": pairs(codes),
            "weight_scale": scales,
            "weight_scale_2": outer,
            "input_scale": torch.tensor(0.1),
        }
        if multiplier:
            factors = 0.5 + torch.arange(weight.shape[1]) / weight.shape[1]
            leaves["pre_quant_scale"] = factors
            dense = dense * factors
        return leaves, dense

    return pack


def mxfp4(codes_leaf: str, scale_leaf: str, style: str = "uint8") -> Pack:
    def pack(weight: Tensor, name: str) -> tuple[Leaves, Tensor]:
        exponent = (block_amax(weight, 1, 32) / 6).log2().ceil()
        each = spread(torch.exp2(exponent), 1, 32, weight.shape)
        codes = nearest_e2m1(weight / each)
        scales = (exponent + 127).to(torch.uint8)
        bytes_ = pairs(codes)
        if style == "e8m0":
            scales, bytes_ = scales.view(torch.float8_e8m0fnu), bytes_.view(torch.int8)
        elif style == "blocks":
            bytes_ = bytes_.unflatten(-1, (-1, 16))
        return {codes_leaf: bytes_, scale_leaf: scales}, E2M1[codes.int()] * each

    return pack


def compressed(
    format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"], "quantization_status": "compressed", **more,
    }  # fmt: skip


def mixed(expert: Pack, other: Pack) -> Pack:
    return lambda weight, name: (expert if ".experts." in name else other)(weight, name)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
NO_HEAD = ["lm_head", "*mlp.gate"]
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
HEAD_SKIP = r"embed|\.mlp\.gate\.weight"

TARGETS: dict[str, Target] = {
    "fp8": Target(fp8(None, None, scale="weight_scale_inv"), FP8),
    "fp8-static": Target(
        fp8(None, None, scale="weight_scale", inputs="input_scale"), {**FP8, "activation_scheme": "static"}
    ),
    "fp8-static-hf": Target(
        fp8(None, None, scale="weight_scale_inv", inputs="activation_scale"), {**FP8, "activation_scheme": "static"}
    ),
    "fp8-block": Target(fp8(128, 128, scale="weight_scale_inv"), {**FP8, "weight_block_size": [128, 128]}),
    "fp8-block-ue8m0": Target(
        fp8(128, 128, scale="weight_scale_inv", style="power"),
        {**FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ),
    "fp8-32-ue8m0": Target(
        fp8(32, 32, scale="scale", style="bytes"), {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
    ),
    "fp8-fp4-experts": Target(
        mixed(mxfp4("weight", "scale", "e8m0"), fp8(32, 32, scale="scale", style="bytes")),
        {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
    ),
    "fp8-head": Target(
        fp8(128, 128, scale="weight_scale_inv"),
        {**FP8, "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
        head=True,
    ),
    "fbgemm": Target(fp8(1, None, scale="weight_scale"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "ct-fp8-dynamic": Target(
        fp8(1, None, scale="weight_scale", style="bf16"),
        compressed("float-quantized", {**FLOAT8, "strategy": "channel"}, TOKEN),
    ),
    "ct-fp8-static": Target(
        fp8(None, None, scale="weight_scale", inputs="input_scale"),
        compressed(
            "float-quantized",
            {**FLOAT8, "strategy": "tensor"},
            {**FLOAT8, "strategy": "tensor"},
            kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
        ),
        extra={
            "model.layers.0.self_attn.k_scale": torch.tensor(1.0),
            "model.layers.0.self_attn.v_scale": torch.ones(1),
        },
    ),
    "ct-fp8-block": Target(
        fp8(128, 128, scale="weight_scale"),
        compressed("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [128, 128]}, TOKEN),
    ),
    "ct-mxfp8": Target(
        fp8(1, 32, scale="weight_scale", style="uint8"),
        compressed(
            "mxfp8-quantized", {**FLOAT8, "strategy": "group", "group_size": 32}, {**TOKEN, "strategy": "group"}
        ),
    ),
    "modelopt-fp8": Target(
        fp8(None, None, scale="weight_scale", inputs="input_scale"),
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": NO_HEAD},
        },
        side_file="hf_quant_config.json",
        extra={"model.layers.1.self_attn.k_proj.k_scale": torch.tensor(1.0)},
    ),
    "modelopt-nvfp4": Target(
        nvfp4(compressed=False),
        {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": NO_HEAD},
        },
        side_file="hf_quant_config.json",
    ),
    "modelopt-nvfp4-awq": Target(
        nvfp4(compressed=False, multiplier=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ", "ignore": NO_HEAD},
    ),
    "ct-nvfp4": Target(
        nvfp4(compressed=True),
        compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
        ),
    ),
    "ct-mxfp4": Target(
        mxfp4("weight_packed", "weight_scale"),
        compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
        ),
    ),
    "mxfp4-experts": Target(
        mxfp4("blocks", "scales", "blocks"),
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]},
        only=r"\.experts\.",
        fuse=True,
    ),
    "gptq": Target(gptq(32, True, 1), GPTQ),
    "gptq-v2-zeros": Target(gptq(32, False, 2), {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"}),
    "gptq-zeros": Target(gptq(32, False, 1), {**GPTQ, "sym": False}),
    "gptq-act-order": Target(gptq(32, True, 1, act_order=True), {**GPTQ, "desc_act": True}),
    "gptq-whole": Target(gptq(-1, True, 1), {**GPTQ, "group_size": -1}, side_file="quantize_config.json"),
    "gptq-dynamic": Target(
        gptq(64, True, 1),
        {**GPTQ, "group_size": 32, "dynamic": {r"-:.*\.o_proj": {}, r"+:.*": {"group_size": 64}}},
        skip=r"embed|\.mlp\.gate\.weight|o_proj",
    ),
    "awq": Target(awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    "ct-int4": Target(packed(32, True), compressed("pack-quantized", INT4)),
    "ct-int4-zeros": Target(packed(32, False), compressed("pack-quantized", {**INT4, "symmetric": False})),
    "ct-int4-act-order": Target(
        packed(32, True, act_order=True), compressed("pack-quantized", {**INT4, "actorder": "group"})
    ),
}


def quantize_checkpoint(source: Path, out: Path, target: str) -> tuple[Path, Path]:
    """(the directory with the quantized model, that with the same values unquantized)."""
    chosen = TARGETS[target]
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    quantized, plain = dict(chosen.extra), dict[str, Tensor]()
    for name, weight in tensors.items():
        matrix = weight.ndim == 2 and name.endswith(".weight") and not re.search(chosen.skip, name)
        if not matrix or ("lm_head" in name and not chosen.head) or not re.search(chosen.only, name):
            quantized[name] = plain[name] = weight
            continue
        leaves, dense = chosen.pack(weight.float(), name)
        quantized |= {f"{name.removesuffix('weight')}{leaf}": value for leaf, value in leaves.items()}
        plain[name] = dense
    if chosen.fuse:
        quantized = _fuse_experts(quantized)
    for path, content in ((out / "quantized", quantized), (out / "plain", plain)):
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
        save_file({name: value.contiguous().clone() for name, value in content.items()}, path / "model.safetensors")
    if chosen.side_file:
        (out / "quantized" / chosen.side_file).write_text(json.dumps(chosen.config))
    else:
        config = json.loads((source / "config.json").read_text())
        (out / "quantized" / "config.json").write_text(json.dumps({**config, "quantization_config": chosen.config}))
    return out / "quantized", out / "plain"


def _fuse_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`experts.0.gate_proj.blocks` and the like as `experts.gate_up_proj_blocks`, gate first, of all experts."""
    found: dict[str, dict[int, dict[str, Tensor]]] = {}
    rest: dict[str, Tensor] = {}
    for name, value in tensors.items():
        part = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.(blocks|scales)", name)
        if part is None:
            rest[name] = value
            continue
        into = "down_proj" if part[3] == "down_proj" else "gate_up_proj"
        found.setdefault(f"{part[1]}.{into}_{part[4]}", {}).setdefault(int(part[2]), {})[part[3]] = value
    for name, experts in found.items():
        order = [["gate_proj", "up_proj"], ["down_proj"]]["down_proj" in experts[0]]
        rest[name] = torch.stack([torch.cat([experts[e][part] for part in order]) for e in sorted(experts)])
    return rest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=sorted(TARGETS), required=True)
    args = parser.parse_args()
    for path in quantize_checkpoint(args.model, args.out, args.format):
        print(path)


if __name__ == "__main__":
    main()
