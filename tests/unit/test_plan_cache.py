"""Steps planned by the short cut for steady rows are the steps the scheduler plans without it."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from fake_executor import undisturbed
from harness import Harness
from test_scheduler_fuzz import GROUPS, run_episode

from rapid_infer.engine.plan_cache import PlanCache
from rapid_infer.engine.step_plan import StepPlan


def plain(value: Any) -> Any:
    """Comparable with ==: arrays become lists with their dtype."""
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def plans(seed: int) -> list[StepPlan]:
    return run_episode(seed, list(GROUPS)).plans


@pytest.mark.parametrize("seed", range(120))
def test_plans_are_the_same_without_the_short_cut(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = plans(seed)
    monkeypatch.setattr(PlanCache, "fits", staticmethod(lambda *args: False))
    slow = plans(seed)
    assert len(quick) == len(slow)
    for a, b in zip(quick, slow):
        assert plain(a) == plain(b)


def test_the_short_cut_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    original = PlanCache.next

    def counted(self: PlanCache, *args: Any) -> Any:
        launch = original(self, *args)
        taken.append(launch is not None)
        return launch

    monkeypatch.setattr(PlanCache, "next", counted)
    steps = sum(len(run_episode(seed).plans) for seed in range(40))
    assert sum(taken) > steps / 8
    assert not all(taken)


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_and_tokens_are_right_after_every_step(depth: int) -> None:
    engine = Harness(queue_depth=depth)
    requests = [engine.add(name, [i, 7, 9], 30) for i, name in enumerate("ab")]
    for n in range(28):
        engine.step()
        rows = engine.scheduler.rows
        for request in requests:
            assert request.output_token_ids == engine.tokens[request.request_id]
            assert len(request.output_token_ids) == n + 1 - (depth - 1)
            assert rows.collected[request.row] == request.num_tokens
            assert rows.known[request.row] == rows.computed[request.row] + 1 == request.num_tokens + depth - 1
    assert engine.scheduler._plan_cache is not None
    engine.run()
    assert all(request.output_token_ids == undisturbed(request) for request in requests)
