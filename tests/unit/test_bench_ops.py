"""The operator benchmark: its figures, its cases, and the script at work on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import op_calls, op_cases, op_cases_experts, op_shapes, op_timing  # noqa: F401
from common.op_shapes import Shape
from common.schema import Result

from rapid_infer.ops import OPS, Op

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "tiny"


@pytest.fixture
def gumbel_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up op under a name for which there are cases, with an argument that they do not know."""

    def gumbel_argmax(logits: torch.Tensor, flavour: str) -> torch.Tensor:
        raise NotImplementedError

    monkeypatch.setitem(OPS, "gumbel_argmax", Op(gumbel_argmax))


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "bench_ops.py"), "--device", "cpu", *map(str, arguments)]
    # Kernels in Triton's interpreter are for tests of what they compute.
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=compiled)


def test_difference() -> None:
    want = torch.tensor([3.0, 4.0])
    assert op_timing.difference(want, want) == 0
    assert op_timing.difference(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert op_timing.difference((want, want + 5), (want, want)) == pytest.approx(50**0.5 / 5)
    assert op_timing.difference(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    cut = torch.tensor([3.0, -torch.inf])
    assert op_timing.difference(cut, cut) == 0
    assert op_timing.difference(want, cut) == 0.5


def test_weights_of_a_gpu_are_cold() -> None:
    assert op_timing.copies_for(8_000_000, "cuda") == 25
    assert op_timing.copies_for(1 << 30, "cuda") == 1
    assert op_timing.copies_for(1, "cuda") == 256
    assert op_timing.copies_for(0, "cuda") == op_timing.copies_for(8_000_000, "cpu") == 1


def test_bytes_and_operations_that_are_counted() -> None:
    shape = Shape.of("qwen3-8b", torch.bfloat16, "cpu", quick=False)
    products = {case.label: case for case in op_shapes.cases("linear", shape)}
    gate_up = products["gate_up 24576x4096, M 16"]
    assert gate_up.flops == 2 * 16 * 24576 * 4096
    assert gate_up.bytes == 2 * (16 * 4096 + 24576 * 4096 + 16 * 24576)
    attention = {case.label: case for case in op_shapes.cases("paged_attention", shape)}
    decode, prefill = attention["decode 256 x 1024"], attention["prefill 512 x 32"]
    assert decode.bytes == 2 * (2 * 256 * 1024 * 8 * 128 + 2 * 256 * 32 * 128)
    assert decode.flops == 4 * 256 * 1024 * 32 * 128
    assert prefill.flops == 4 * 32 * (512 * 513 // 2) * 32 * 128


def test_experts_and_latents_that_are_counted() -> None:
    shape = Shape.of("deepseek-v2-lite", torch.bfloat16, "cpu", quick=False)
    experts = {case.label: case for case in op_shapes.cases("fused_experts", shape)}
    one, many = experts["1 x 6 of 64, 1408"], experts["8192 x 6 of 64, 1408"]
    assert one.bytes == 2 * (6 * 3 * 1408 * 2048 + 2 * 2048)
    assert many.bytes == 2 * (64 * 3 * 1408 * 2048 + 2 * 8192 * 2048)
    assert many.flops == 6 * 8192 * 6 * 1408 * 2048
    decode = {case.label: case for case in op_shapes.cases("mla_decode", shape)}["decode 32 x 640"]
    assert decode.bytes == 2 * (32 * 640 * 576 + 32 * 16 * (576 + 512))
    with pytest.raises(LookupError, match="qwen3-8b has no kv_lora_rank"):
        op_shapes.cases("mla_decode", Shape.of("qwen3-8b", torch.bfloat16, "cpu", quick=True))


def test_cases_of_experts_and_latents_run(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 99}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    moe = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **latent, **moe}))
    shape = Shape.of(str(tmp_path), torch.float32, "cpu", quick=True)
    ran = [
        case.op
        for op in ("fused_experts", "route_experts", "router_logits", *(n for n in OPS if n.startswith("mla_")))
        for case in op_shapes.cases(op, shape)
        if op_calls.outputs(OPS[op].reference, case.make(), OPS[op].mutates)
    ]
    assert len(set(ran)) == 7


@pytest.mark.usefixtures("gumbel_argmax")
def test_an_op_without_cases_says_why(tiny: Path) -> None:
    shape = Shape.of(str(tiny), torch.float32, "cpu", quick=True)
    with pytest.raises(LookupError, match="no case builder"):
        op_shapes.cases("made_up", shape)
    with pytest.raises(LookupError, match="does not know its arguments flavour"):
        op_shapes.cases("gumbel_argmax", shape)[0].make()


def test_bench_ops(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "ops.json"
    done = run("--quick", "--model", tiny, "--dtype", "float32", "--output", output)
    assert done.returncode == 0, done.stderr
    found = Result.from_json(output.read_text())
    cases = found.metrics["cases"]
    assert {case["op"] for case in cases} >= {"linear", "rms_norm", "paged_attention", "silu_and_mul"}
    assert {(case["op"], case["provider"]) for case in cases} >= {("rms_norm", "cpu"), ("rms_norm", "torch")}
    for case in cases:
        assert case["seconds"] > 0
        assert case["difference"] < 1e-3, case
        assert case["bytes_per_s"] == pytest.approx(case["bytes"] / case["seconds"])
    assert found.metrics["peaks"]["bytes_per_s"] > 0
    assert "runs on cuda" in found.metrics["skipped"]["rms_norm=triton"]
    assert "vs torch" in done.stdout
    assert found.command in output.with_suffix(".log").read_text()


def test_one_op_and_one_provider(tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "one.json"
    done = run("--quick", "--model", tiny, "--op", "rms_norm", "--provider", "cpu", "--output", output)
    assert done.returncode == 0, done.stderr
    cases = Result.from_json(output.read_text()).metrics["cases"]
    assert {(case["op"], case["provider"]) for case in cases} == {("rms_norm", "cpu")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "rms_nrom"], "unknown op rms_nrom; expected"),
        (["--provider", "trition"], "unknown provider trition; expected"),
        (["--model", "absent"], "--model absent: neither a directory with config.json nor one of qwen3"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
