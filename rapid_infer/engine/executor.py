"""What the engine needs of whatever runs the model: launch without waiting, then collect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rapid_infer.cache.spec import CacheGroup
from rapid_infer.engine.step_plan import RowMasks, StepPlan, StepResult
from rapid_infer.errors import RapidInferError


@dataclass(frozen=True)
class ModelInfo:
    """What engine and front must know of the loaded model; they import no plugin.

    `num_blocks`: of each pool of `groups`. `num_drafts`: how many tokens of a row are guessed and verified in a step.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    groups: Sequence[CacheGroup]
    num_blocks: Sequence[int]
    block_size: int
    dtype: str
    num_drafts: int = 0


class Executor(Protocol):
    """Runs steps in the order launched."""

    @property
    def info(self) -> ModelInfo: ...

    def launch(self, plan: StepPlan) -> Any:
        """Start a step and return a handle without waiting for it. May raise what the forward raised."""
        ...

    def launch_forward(self, plan: StepPlan) -> Any:
        """As `launch`, but without choosing tokens: `launch_sample` must follow before the next launch."""
        ...

    def launch_sample(self, handle: Any, masks: RowMasks | None) -> None:
        """Choose the tokens of the step just begun, under these masks. May raise what that raised."""
        ...

    def collect(self, handle: Any) -> StepResult:
        """Wait for a launched step: the engine's only wait for the device."""
        ...

    def healthy(self) -> bool:
        """Whether another step can run after one has failed. Waits for the steps in flight, which may be dropped."""
        ...

    def late_graphs(self) -> tuple[int, float]:
        """(CUDA graphs that were recorded after the start, seconds that took)."""
        ...

    def on_failure(self, call: Callable[[RapidInferError], object]) -> None:
        """`call(error)`, in any thread, when steps can run no more, also while none is in flight."""
        ...

    def close(self) -> None: ...
