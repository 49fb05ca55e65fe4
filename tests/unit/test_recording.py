"""What a CUDA graph cannot record is not bound where steps are recorded; a recording that fails says what it was."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from rapid_infer.config import CheckpointInfo, DeviceInfo, EngineArgs
from rapid_infer.device import GpuInfo
from rapid_infer.errors import ConfigError
from rapid_infer.layers.context import BuildContext
from rapid_infer.ops import OPS, OpResolver, load_providers, registry
from rapid_infer.testing.op_cases import cases_of
from rapid_infer.worker import build
from rapid_infer.worker.build import build_model
from rapid_infer.worker.graph_recorder import GraphRecorder

load_providers()

REASON = "waits for the device, which a CUDA graph cannot record: set enforce_eager=True"


def without_values(value: Any, mode: FakeTensorMode) -> Any:
    """As the host sees what lies on a device: shapes and dtypes."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    if dataclasses.is_dataclass(value):
        tensors = {name: each for name, each in vars(value).items() if isinstance(each, Tensor)}
        return dataclasses.replace(value, **{name: mode.from_tensor(each) for name, each in tensors.items()})
    return value


@pytest.mark.parametrize(("name", "provider"), [*((name, "torch") for name in OPS), ("fused_experts", "grouped_mm")])
def test_providers_say_whether_they_read_values_on_the_host(name: str, provider: str) -> None:
    found = True
    for case in cases_of(OPS[name], torch.bfloat16, "cpu"):
        with FakeTensorMode() as mode:
            try:
                OPS[name].providers[provider].fn(**{key: without_values(v, mode) for key, v in case.kwargs.items()})
            except (DataDependentOutputException, DynamicOutputShapeException):
                found = False
    assert OPS[name].providers[provider].capturable == found


H200 = GpuInfo("NVIDIA H200", (9, 0), 132)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "gpu_info", lambda device: H200 if device.type == "cuda" else None)


LAYER = {"head_dim": 128, "block_size": 64}


def test_what_a_graph_cannot_record_is_not_bound(cuda: None) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError) as error:
        OpResolver("cuda", {"paged_attention": ["torch"]}, cuda_graphs=True).bind(
            "paged_attention", torch.bfloat16, **LAYER
        )
    assert str(error.value) == (
        "no provider of op paged_attention in op_priority can run on cuda in torch.bfloat16: "
        f"torch: {REASON}; one of these can: triton"
    )
    for wanted, graphs, bound in ((["torch"], False, "torch"), (["torch", "triton"], True, "triton")):
        ops = OpResolver("cuda", {"paged_attention": wanted}, cuda_graphs=graphs)
        assert ops.bind("paged_attention", torch.bfloat16, **LAYER).provider == bound
    # Its reference reads nothing on the host.
    ops = OpResolver("cuda", {"rms_norm": ["torch"]}, cuda_graphs=True)
    assert [ops.bind("rms_norm", torch.bfloat16).provider, ops.pinned] == ["torch", ["rms_norm=torch"]]


class Model(nn.Module):
    """Without parameters."""

    def __init__(self, config: Any, ctx: BuildContext) -> None:
        super().__init__()
        self.found = ctx.ops.cuda_graphs

    @staticmethod
    def read_config(hf_config: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("device", "eager", "at", "graphs"),
    [
        ("cuda", False, "cuda", True),
        ("cuda", True, "cuda", False),
        ("cuda", False, "meta", False),
        ("cpu", False, "cpu", False),
    ],
)
def test_a_model_is_built_with_what_a_graph_can_record_where_steps_are_recorded(
    device: str, eager: bool, at: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "check_model", lambda model, config, architecture: None)
    args = EngineArgs(dtype="bfloat16", enforce_eager=eager)
    config = args.resolve(CheckpointInfo(512, "bfloat16"), DeviceInfo(device, True, 1 << 40))
    checkpoint: Any = SimpleNamespace(hf_config=None, quantization_config=None, architecture="Model")
    assert build_model(Model, checkpoint, config, at).model.found == graphs


class Device:
    """What torch keeps of captures. One that CUDA has cancelled cannot be ended, and its pool stays open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.open: list[int] = []
        self.users: dict[int, int] = {}
        self.cancelled = False
        for name, value in {
            "Stream": lambda device: self,
            "current_stream": lambda: self,
            "current_device": lambda: 0,
            "stream": lambda stream: nullcontext(),
            "graph_pool_handle": self.new_pool,
            "CUDAGraph": lambda: Graph(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setitem(torch._C.__dict__, name, getattr(self, name))

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None:
        self.log.append("wait")

    def new_pool(self) -> int:
        self.users[len(self.users)] = 0
        return len(self.users) - 1

    def _cuda_endAllocateToPool(self, device: int, pool: int) -> None:
        self.open.remove(pool)

    def _cuda_releasePool(self, device: int, pool: int) -> None:
        self.users[pool] -= 1


class Graph:
    def __init__(self, device: Device) -> None:
        self.device, self.ended, self.pool = device, False, -1

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        self.device.log.append("begin")
        if pool in self.device.open:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.device.open.append(pool)
        self.device.users[pool] += 1
        self.pool = pool

    def capture_end(self) -> None:
        self.device.log.append("end")
        if self.device.cancelled:
            self.device.cancelled = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.device.open.remove(self.pool)
        self.ended = True

    def reset(self) -> None:
        if self.ended:
            self.device.users[self.pool] -= 1


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_recording_that_fails_says_what_it_was_and_leaves_nothing(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    ops = OpResolver("cpu", {"rms_norm": ["torch"], "linear": ["torch"]})
    for name in ("rms_norm", "embedding", "rms_norm"):
        ops.bind(name, torch.float32)

    def run() -> None:
        if "begin" in device.log:
            device.cancelled = cancelled
            raise ValueError("not now")
        device.log.append("run")

    recorder = GraphRecorder(torch.device("cpu"), ops)
    with pytest.raises(RuntimeError) as error:
        recorder.record("forward of 64 tokens", run)
    assert str(error.value) == (
        "recording the CUDA graph for the forward of 64 tokens failed with ValueError: not now; "
        "enforce_eager=True runs without graphs; op_priority chose rms_norm=torch"
    )
    assert device.log == ["run", "wait", "begin", "end"]
    assert [device.open, device.users] == [[], {0: 0, 1: 0}]
    graphs = [recorder.record("forward of 32 tokens", lambda: None)[0] for _ in range(2)]
    assert [device.open, device.users] == [[], {0: 0, 1: len(graphs)}]


def test_a_capture_that_cannot_be_ended_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that CUDA refuses may say nothing itself."""
    device = Device(monkeypatch)

    def run() -> None:
        device.cancelled = "begin" in device.log

    recorder = GraphRecorder(torch.device("cpu"), OpResolver("cpu"))
    with pytest.raises(RuntimeError, match="failed with RuntimeError: operation failed due to a previous error"):
        recorder.record("forward of 64 tokens", run)
    recorder.record("forward of 64 tokens", lambda: None)
    assert device.open == []
