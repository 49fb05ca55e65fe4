"""A rank that raises, dies or hangs ends the job with its name, and leaves the caller and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rapid_infer import LLM, ModelRegistry, SamplingParams
from rapid_infer.errors import EngineDeadError, RapidInferError
from rapid_infer.executors import rank_group
from rapid_infer.executors.rank_group import RankGroup, behind
from rapid_infer.executors.rank_messages import Failed

OPTIONS = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4}
LIMIT = 20.0


@pytest.fixture
def faulty(checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """`faulty(how, phase, rank)` opens an engine on two ranks, one of which will misbehave."""
    path = tmp_path / "model"
    path.mkdir()
    for file in checkpoint("qwen3").iterdir():
        (path / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["FaultyForCausalLM"]}))
    monkeypatch.setenv("FAULT", str(tmp_path / "fault.json"))
    # Known in this process alone: ranks are given the class by name.
    ModelRegistry.register("FaultyForCausalLM", "faulty_model:FaultyForCausalLM", override=True)

    def open_(how: str, phase: str, rank: int) -> LLM:
        (tmp_path / "fault.json").write_text(json.dumps({"how": how, "phase": phase, "rank": rank}))
        if phase == "load":
            monkeypatch.setattr(rank_group, "STUCK_SECONDS", 3.0)
        llm = LLM(str(path), tensor_parallel_size=2, **OPTIONS)
        # Not before: on a machine that does other work, a rank may well say nothing for so long while it starts.
        monkeypatch.setattr(rank_group, "STUCK_SECONDS", 3.0)
        return llm

    return open_


def children() -> set[int]:
    """Processes that this one has started and that have not ended."""
    found = [file.read_text().split() for file in Path("/proc/self/task").glob("*/children")]
    pids = {int(pid) for one in found for pid in one}
    return {pid for pid in pids if rank_group.process_state(pid) not in ("", "Z", "X")}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("how", "phase", "rank", "message"),
    [
        ("raise", "step", 1, r"rank 1 raised in phase step, step 1: RuntimeError: broken on purpose in step\n(.|\n)*fau"),
        ("kill", "step", 0, r"rank 0 \(pid \d+\) was killed by SIGKILL at step 1, in phase step"),
        ("hang", "step", 1, r"no rank got on for \d+ s: rank 1 is behind, at step 1, .* in phase step(.|\n)*misbehave"),
        ("busy", "step", 0, r"no rank got on for \d+ s: rank 0 is behind, at step 1, .* in phase step(.|\n)*misbehave"),
        pytest.param("raise", "load", 1, r"rank 1 raised in phase load, .*on purpose in load", marks=pytest.mark.slow),
        pytest.param("kill", "load", 0, r"rank 0 .*killed by SIGKILL .*in phase load", marks=pytest.mark.slow),
        pytest.param("hang", "load", 0, r"rank 0 is behind, .*in phase load(.|\n)*misbehave", marks=pytest.mark.slow),
        pytest.param("raise", "allocate", 0, r"rank 0: .*on purpose in allocate", marks=pytest.mark.slow),
        pytest.param("stop", "step", 1, r"rank 1 is behind(.|\n)*stopped \(by SIGSTOP", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_is_named_and_the_caller_lives_on(
    how: str, phase: str, rank: int, message: str, faulty: Callable[..., LLM]
) -> None:
    before, started = (children(), descriptors()), 0.0
    llm = None
    with pytest.raises(RapidInferError) as raised:
        if phase in ("load", "allocate"):
            started = time.monotonic()
            faulty(how, phase, rank)
        else:
            llm = faulty(how, phase, rank)
            started = time.monotonic()
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert re.search(message, str(raised.value)), raised.value
    assert time.monotonic() - started < LIMIT + (0 if llm else 30)
    if llm is not None:
        # Every later call says the same.
        with pytest.raises(EngineDeadError):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        llm.close()
    assert children() == before[0]
    # What the first one opens for good.
    assert descriptors() <= before[1] + 2


def test_a_rank_that_dies_while_nobody_asks_is_named_by_the_next_call(faulty: Callable[..., LLM]) -> None:
    with faulty("none", "never", 0) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        group: RankGroup = llm.engine.core.executor.group
        os.kill(group.children[1].process.pid, signal.SIGKILL)
        group._watcher.join(LIMIT)
        with pytest.raises(EngineDeadError, match=r"rank 1 \(pid \d+\) was killed by SIGKILL .*in phase idle"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))


@pytest.mark.parametrize(
    ("phase", "what", "ends"),
    [("step", "works", False), ("step", "computes", True), ("load", "computes", False), ("load", "nothing", True)],
)
def test_silence_ends_a_rank_and_work_does_not(
    phase: str, what: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, work, seconds = [0.0], [0], [0]
    monkeypatch.setattr(rank_group, "STUCK_SECONDS", 5.0)
    monkeypatch.setattr(rank_group.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rank_group, "cpu_seconds", lambda pid: seconds[0])
    number = rank_group.PHASES.index(phase)
    group: Any = SimpleNamespace(
        board=SimpleNamespace(snapshot=lambda: ((number, 1, 2, work[0]), (number, 1, 3, 0))),
        phase_of=lambda rank: phase,
        children=[SimpleNamespace(process=SimpleNamespace(pid=1))] * 2,
        end_stuck=lambda seconds: ended.append(seconds),
    )
    ended: list[float] = []
    stuck = rank_group._Stuck(group)
    for _ in range(20):
        now[0] += 1
        work[0] += what == "works"
        seconds[0] += what == "computes"
        stuck.check()
    assert bool(ended) is ends


def test_a_ranks_own_error_comes_before_deaths_and_those_before_lost_connections() -> None:
    group = object.__new__(RankGroup)
    group.board = type("Board", (), {"snapshot": lambda self: ((5, 3, 9),) * 3, "steps": [3] * 3})()
    lost = Failed(None, "RuntimeError: Connection closed by peer", "", "step", 3, True)
    own = Failed(None, "ValueError: mine", "trace", "step", 3, False)
    group._reports = {0: lost, 1: "rank 1 (pid 7) was killed by SIGKILL", 2: own}
    assert "rank 2 raised in phase step, step 3: ValueError: mine\ntrace" in str(group._first_cause())
    group._reports = {0: lost, 1: "rank 1 (pid 7) was killed by SIGKILL"}
    assert "rank 1 (pid 7) was killed" in str(group._first_cause())
    group._reports = {0: lost, 2: Failed("WeightError", "no such file", "", "load", 0, False)}
    assert str(group._first_cause()) == "rank 2: no such file"


def test_who_is_behind_has_the_fewest_steps_and_then_collectives() -> None:
    assert behind(((5, 3, 9), (5, 3, 8), (5, 3, 9))) == [1]
    assert behind(((5, 3, 9), (5, 2, 99), (5, 3, 8))) == [1]
    assert behind(((6, 3, 9), (5, 3, 9))) == [0, 1]


ORPHANS = """
import sys
from rapid_infer import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=2, device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64)
print(*(child.process.pid for child in llm.engine.core.executor.group.children), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_rank_outlives_a_process_that_is_killed(checkpoint: Callable[..., Path]) -> None:
    """It is a script without a __main__ guard, too."""
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(checkpoint("qwen3"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.wait()
    until = time.monotonic() + LIMIT
    while any(rank_group.process_state(pid) not in ("", "Z", "X") for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_opening_and_closing_leaves_nothing(checkpoint: Callable[..., Path]) -> None:
    before = None
    for _ in range(20):
        with LLM(str(checkpoint("qwen3")), tensor_parallel_size=2, **OPTIONS) as llm:
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        assert not children()
        # The first one imports and opens what stays.
        before = before or descriptors()
        assert descriptors() <= before
    assert not list(Path("/dev/shm").glob("*rapid*"))
