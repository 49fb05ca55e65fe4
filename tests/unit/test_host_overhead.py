"""What the host costs when the model costs nothing: 256 rows in steady decode, on the GPU's default block size.

Once with eager steps, as on a CPU, and once with captured ones, where the host only writes and reads the ring. And
what comes before and after: taking in prompts, and the outputs of a step. The limits are for an idle machine of
ordinary speed; on a slower one, or a busy one, they rise with the time that a fixed piece of Python and numpy takes.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rapid_infer.cache.spec import CacheGroup, FullKV
from rapid_infer.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from rapid_infer.engine import results
from rapid_infer.engine.core import EngineCore
from rapid_infer.engine.executor import ModelInfo
from rapid_infer.engine.request import Request
from rapid_infer.engine.results import StepOutputs
from rapid_infer.engine.step_plan import StepPlan, StepResult
from rapid_infer.frontend import EngineInfo, InputProcessor, OutputProcessor
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.ops import OpResolver
from rapid_infer.ops.step_inputs import StepLayout
from rapid_infer.outputs import RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams
from rapid_infer.worker.model_runner import ModelRunner, StepHandle
from rapid_infer.worker.step_ring import StepRing

ROWS, VOCAB, BLOCK_SIZE, MAX_LEN = 256, 8, 64, 4096
REFERENCE_MS = 1.6
"""Of `reference` on the machine that the limits are for."""


def reference() -> float:
    """Seconds of this thread for work of the kind that is measured here."""
    values, rows, total = np.arange(256), np.arange(256), []
    start = time.thread_time()
    for i in range(300):
        taken = values[rows] + i
        total.append(int(np.flatnonzero(taken > 200).sum()))
        total += [n + 1 for n in taken[:32].tolist()]
    return time.thread_time() - start


def slower() -> float:
    """How many times as long as that machine this one takes at the moment; 1 at least."""
    return max(1.0, min(reference() for _ in range(20)) * 1e3 / REFERENCE_MS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Waiting for a second thread, which on a busy machine takes milliseconds, is nothing that a GPU's host does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class StubModel:
    """Costs one slice for the forward and one for the head; its best token is always 0."""

    def __init__(self) -> None:
        self.head = self
        self.hidden, self.scores = torch.zeros(8192, 4), torch.zeros(ROWS, VOCAB)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        return self.hidden[: len(batch.input_ids)]

    def argmax(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.scores[: len(hidden)].max(dim=-1)


class StubExecutor:
    def __init__(self, queue_depth: int) -> None:
        groups = [CacheGroup(FullKV(1, 8, "float32"), 1)]
        self.info = ModelInfo("Stub", VOCAB, MAX_LEN, groups, [ROWS * MAX_LEN // BLOCK_SIZE + 1], BLOCK_SIZE, "float32")
        self.runner = ModelRunner(
            StubModel(),
            torch.device("cpu"),
            OpResolver("cpu"),
            max_num_seqs=ROWS,
            max_num_batched_tokens=8192,
            max_model_len=MAX_LEN,
            block_size=BLOCK_SIZE,
            num_groups=1,
            queue_depth=queue_depth,
            vocab_size=VOCAB,
        )

    def launch(self, plan: StepPlan) -> StepHandle:
        return self.runner.launch(plan)

    def collect(self, handle: StepHandle) -> StepResult:
        return self.runner.collect(handle)

    def healthy(self) -> bool:
        return True

    def close(self) -> None:
        pass


class CapturedExecutor(StubExecutor):
    """Does what the host does around a captured step, without replaying anything."""

    def __init__(self, queue_depth: int) -> None:
        super().__init__(queue_depth)
        shape = self.runner.device_rows.block_tables.shape
        self.ring = StepRing(
            torch.device("cpu"), StepLayout(ROWS, 2 * ROWS, 8192), slots=queue_depth + 1, table_shape=shape
        )

    def launch(self, plan: StepPlan) -> Any:
        if plan.new_rows is not None or plan.max_query_len > 1:
            return super().launch(plan)
        return self.ring.write_decode(plan.rows, ROWS, plan.new_blocks)

    def collect(self, handle: Any) -> StepResult:
        if not isinstance(handle, int):
            return super().collect(handle)
        tokens, failed = self.ring.read_results(handle, ROWS)
        return StepResult(tokens[:, None], failed)


def idle_engine(queue_depth: int, executor: type[StubExecutor] = StubExecutor) -> EngineCore:
    config = EngineConfig(
        model=ModelConfig("float32", MAX_LEN, False, "dummy", 0),
        cache=CacheConfig(BLOCK_SIZE, 0.9, None, True),
        scheduler=SchedulerConfig(ROWS, 8192, True, queue_depth),
        parallel=ParallelConfig(),
        device="cpu",
    )
    return EngineCore(config, executor(queue_depth))


def steady_engine(queue_depth: int, executor: type[StubExecutor] = StubExecutor) -> EngineCore:
    """All rows decode; their lengths differ, so that each step has about as many rows that need a new block."""
    core = idle_engine(queue_depth, executor)
    for i in range(ROWS):
        prompt = np.full(16 + i % BLOCK_SIZE, 1 + i % 7, np.int32)
        core.add_request(Request(str(i), prompt, SamplingParams(temperature=0), (7,), MAX_LEN, cache_salt=b"%d" % i))
    for _ in range(10):
        core.step()
    assert len(core.scheduler.running) == ROWS
    return core


def timed(owner: Any, name: str, times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        result = original(*args, **kwargs)
        times.append(time.thread_time() - start)
        return result

    monkeypatch.setattr(owner, name, measured)


@pytest.mark.parametrize(
    ("executor", "queue_depth", "limit_ms"),
    [(StubExecutor, 1, 0.4), (StubExecutor, 2, 0.4), (CapturedExecutor, 2, 0.09)],
    ids=["eager-1", "eager-2", "captured-2"],
)
def test_a_steady_step_costs_the_host_little(executor: type[StubExecutor], queue_depth: int, limit_ms: float) -> None:
    core = steady_engine(queue_depth, executor)
    medians = []
    # Time of this thread, and the best of several: what else the machine does is no cost of ours and only adds to it.
    for _ in range(10):
        times = []
        for _ in range(64):
            start = time.thread_time()
            outputs = core.step()
            times.append(time.thread_time() - start)
            assert len(outputs.token_ids) == ROWS
        medians.append(statistics.median(times) * 1e3)
    print(f"host overhead of a step with {ROWS} rows: {min(medians):.3f} ms (largest median {max(medians):.3f})")
    assert min(medians) < limit_ms * slower()


def test_where_a_captured_step_spends_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    core = steady_engine(2, CapturedExecutor)
    parts = {"schedule": core.scheduler, "launch": core.executor, "collect": core.executor, "apply_result": results}
    times: dict[str, list[float]] = {name: [] for name in parts}
    for name, owner in parts.items():
        timed(owner, name, times[name], monkeypatch)
    for _ in range(64):
        core.step()
    for name, measured in times.items():
        assert len(measured) == 64
        print(f"{name:10s} {statistics.median(measured) * 1e6:6.0f} us")


def test_taking_in_long_prompts_costs_the_host_little() -> None:
    core = idle_engine(2)
    inputs = InputProcessor(EngineInfo("Stub", "float32", "cpu", VOCAB, MAX_LEN, (7,), 0, True), None)
    prompts = [[(i + n) % 7 for n in range(2112)] for i in range(ROWS)]
    params = SamplingParams(temperature=0)
    times = []
    for _ in range(5):
        start = time.thread_time()
        for prompt in prompts:
            for request in inputs.requests("", inputs.encode(prompt), params):
                core.add_request(request)
        times.append((time.thread_time() - start) * 1e3)
    print(f"{ROWS} prompts of 2112 tokens: {min(times):.1f} ms")
    assert min(times) < 25 * slower()


@pytest.mark.parametrize(("kind", "limit_ms"), [(RequestOutputKind.FINAL_ONLY, 0.02), (RequestOutputKind.DELTA, 1.0)])
def test_the_outputs_of_a_step_cost_the_host_little(kind: RequestOutputKind, limit_ms: float) -> None:
    outputs = OutputProcessor(None)
    names = [f"{i}/0" for i in range(ROWS)]
    for i, name in enumerate(names):
        outputs.add(RequestOutput(str(i), None, [1], []), SamplingParams(), kind, [name])
    times = []
    for _ in range(256):
        step = StepOutputs(names, [0] * ROWS)
        start = time.thread_time()
        shown, _ = outputs.process(step)
        times.append((time.thread_time() - start) * 1e3)
        assert len(shown) == (0 if kind is RequestOutputKind.FINAL_ONLY else ROWS)
    print(f"outputs of a step with {ROWS} rows, {kind.name}: {statistics.median(times):.3f} ms")
    assert statistics.median(times) < limit_ms * slower()
