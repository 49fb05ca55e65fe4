"""The script's packing against the library that defines it (an optional package), and published bytes.

What it packs is what the readers are tested with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packers import script
from test_quantized_layers import CPU, OneFormat, fill
from torch import Tensor

from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.linear import Linear
from rapid_infer.ops import OPS
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.formats.fp4 import Mxfp4Format
from rapid_infer.quant.formats.fp8 import Fp8Format, blocks
from rapid_infer.quant.quantized import QuantizedLinear

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT = {"type": "float", "symmetric": True}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "int4": ("pack-quantized", script.packed(32, True), {**INT4, "symmetric": True}),
    "int4 zeros": ("pack-quantized", script.packed(32, False), {**INT4, "symmetric": False}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        script.nvfp4(True),
        {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        script.mxfp4("weight_packed", "weight_scale"),
        {**FLOAT, "num_bits": 4, "strategy": "group", "group_size": 32},
    ),
    "fp8 rows": (
        "float-quantized",
        script.fp8(1, None, scale="weight_scale"),
        {**FLOAT, "num_bits": 8, "strategy": "channel"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_packing_is_what_the_library_reads(name: str) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format, pack, args = CASES[name]
    leaves, dense = pack(torch.randn(64, 192, generator=torch.Generator().manual_seed(2)), "layer")
    leaves.pop("input_global_scale", None)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    if leaves["weight_scale"].dtype is torch.float16:
        leaves["weight_scale"] = leaves["weight_scale"].float()
    got = compressor.decompress(leaves, scheme)["weight"].float()
    assert (got - dense).abs().max() <= 4e-3 * dense.abs().max()
    assert (got - dense).norm() <= 2e-3 * dense.norm()


def dequantized(format: Format, shape: tuple[int, int], leaves: dict[str, Tensor]) -> Tensor:
    layer = Linear(BuildContext(torch.float32, CPU, 64, quant=OneFormat(format), name="layer"), shape[1], shape[0])
    fill(layer, None, leaves)
    layer.finalize_weights()
    assert isinstance(layer.quant, QuantizedLinear)
    return OPS["dequantize"].reference(layer.quant.converted.matrix, torch.float32)


def test_published_bytes() -> None:
    """Of DeepSeek-V4.1-Flash: FP8 with a scale for 32 x 32, and FP4 with one for 32 inputs."""
    stored = bytes.fromhex("d871f2797069f0e55370eee3dcd8776d")
    values = torch.frombuffer(bytearray(stored), dtype=torch.uint8).view(torch.float8_e4m3fn).unsqueeze(0)
    leaves = {"weight": values, "scale": torch.tensor([[0x73]], dtype=torch.uint8)}
    got = dequantized(Fp8Format(blocks(32, 32), "scale", exponents=True), (1, 16), leaves)
    expected = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    assert got[0, :8].tolist() == expected
    stored = bytes.fromhex("a0a8ec4aadaf42aa")
    codes = torch.frombuffer(bytearray(stored), dtype=torch.uint8).unsqueeze(0)
    leaves = {"weight": codes, "scale": torch.tensor([[0x78]], dtype=torch.uint8)}
    got = dequantized(Mxfp4Format("weight", "scale"), (1, 16), leaves)
    expected = [0, -0.0078125, 0, -0.0078125, -0.015625, -0.03125, -0.0078125, 0.015625]
    expected += [-0.0234375, -0.0078125, -0.046875, -0.0078125, 0.0078125, 0.015625, -0.0078125, -0.0078125]
    assert got[0].tolist() == expected
