"""Steps planned by the short cut for steady rows are the steps the scheduler plans without it."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from fake_executor import undisturbed
from harness import Harness
from test_scheduler_fuzz import run_episode

from rapid_infer.engine import steady
from rapid_infer.engine.steady import SteadyBatch
from rapid_infer.engine.step_plan import StepPlan


def plain(value: Any) -> Any:
    """Comparable with ==: arrays become lists with their dtype."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def plans(seed: int) -> list[StepPlan]:
    return run_episode(seed).plans


@pytest.mark.parametrize("seed", range(120))
def test_plans_are_the_same_without_the_short_cut(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = plans(seed)
    monkeypatch.setattr(SteadyBatch, "fits", staticmethod(lambda *args: False))
    slow = plans(seed)
    assert len(quick) == len(slow)
    for a, b in zip(quick, slow):
        assert plain(a) == plain(b)


def test_the_short_cut_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    original = SteadyBatch.next

    def counted(self: SteadyBatch, *args: Any) -> Any:
        launch = original(self, *args)
        taken.append(launch is not None)
        return launch

    monkeypatch.setattr(SteadyBatch, "next", counted)
    steps = sum(len(plans(seed)) for seed in range(40))
    assert sum(taken) > steps / 8
    assert not all(taken)


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_of_more_steps_than_the_log_holds_reach_their_requests(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "_LOGGED", 8)
    engine = Harness(queue_depth=depth)
    requests = [engine.add(name, [i, 7, 9], 30) for i, name in enumerate("ab")]
    for _ in range(29):
        engine.step()
    assert engine.scheduler._steady is not None
    assert all(len(request.output_token_ids) >= 20 for request in requests), "more than the log holds is held back"
    engine.run()
    for request in requests:
        assert request.output_token_ids == engine.tokens[request.request_id] == undisturbed(request)
