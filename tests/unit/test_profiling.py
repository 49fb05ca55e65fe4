"""Spans: nothing when off, ranges in the trace when on."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rapid_infer import profiling
from rapid_infer.profiling import span, traced


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    profiling.disable()


def ranges(path: Path) -> dict[str, dict]:
    """The trace's user annotations by name."""
    events = json.loads(path.read_text())["traceEvents"]
    return {event["name"]: event for event in events if event.get("cat") == "user_annotation"}


def test_off_is_one_shared_null_context() -> None:
    assert not profiling.enabled()
    first, second = span("engine.schedule"), span("worker.forward")
    assert first is second
    with first as outer, second as inner:
        assert outer is None
        assert inner is None


def test_off_lets_errors_and_results_through() -> None:
    @traced("test.double")
    def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    assert double(3) == 6
    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    with pytest.raises(KeyError), span("test.fails"):
        raise KeyError


def test_spans_nest_in_the_trace(tmp_path: Path) -> None:
    @traced("test.function")
    def function() -> torch.Tensor:
        return torch.ones(8, 8) @ torch.ones(8, 8)

    with profiling.profile(tmp_path / "new", prefix="run") as recorded:
        with span("test.outer"):
            with span("test.inner"):
                function()
            function()
        recorded.stop()
        with span("test.late"):
            function()
    assert recorded.path == tmp_path / "new" / "run.trace.json"
    found = ranges(recorded.path)
    assert {"test.outer", "test.inner", "test.function"} <= set(found)
    assert "test.late" not in found
    outer, inner = found["test.outer"], found["test.inner"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert not profiling.enabled()


def test_a_second_trace_does_not_replace_the_first(tmp_path: Path) -> None:
    with profiling.profile(tmp_path) as first:
        pass
    with profiling.profile(tmp_path) as second:
        pass
    assert first.path != second.path
    assert first.path.exists()
    assert second.path.exists()


def test_spans_stay_on_for_who_turned_them_on(tmp_path: Path) -> None:
    profiling.enable()
    with profiling.profile(tmp_path):
        pass
    assert profiling.enabled()
    profiling.disable()
    assert not profiling.enabled()


def test_durations() -> None:
    with profiling.durations() as found:
        with span("load.all"), span("load.part"):
            pass
        with pytest.raises(ValueError), span("load.fails"):
            raise ValueError
    assert [(d.name, d.depth) for d in found] == [("load.all", 0), ("load.part", 1), ("load.fails", 0)]
    assert 0 <= found[1].seconds <= found[0].seconds
    assert not profiling.enabled()


def test_torch_is_not_imported_before_spans_are_on() -> None:
    code = (
        "import sys; from rapid_infer.profiling import span; span('a.b').__enter__(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
