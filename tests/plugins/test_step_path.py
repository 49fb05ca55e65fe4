"""How many files one step of the same decoding rows passes on the host. `pytest -s` prints them in order."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rapid_infer
from rapid_infer import LLM, SamplingParams
from rapid_infer.ops import OPS, load_providers
from rapid_infer.testing.acted_graphs import ActingRecorder

ROOT = Path(rapid_infer.__file__).parent
MODEL = ("layers/", "ops/", "parallel/", "quant/", "testing/")
"""What a model and its operators consist of, and the recorder that acts in a GPU's place."""
BESIDE = {"profiling.py", "engine/step_plan.py", "cache/manager.py", "cache/block_pool.py"}
"""Spans that are off, a property of the plan, blocks that wait for the end of a step: nothing is handed on there."""


def files_of_a_step(llm: LLM, number: int) -> list[str]:
    """Of the engine's `number`th step from here, from plan to outputs, in the order in which they are first entered."""
    core: Any = llm.engine.core
    step, done = core.step, 0
    found: dict[str, None] = {}

    def file_of(frame: FrameType | None) -> str:
        file = Path(frame.f_code.co_filename if frame is not None else "")
        return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else ""

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and not (file_of(frame).startswith(MODEL) or file_of(frame.f_back).startswith(MODEL)):
            found[file_of(frame)] = None

    def noted() -> Any:
        nonlocal done
        done += 1
        before = sys.getprofile()
        sys.setprofile(note if done == number else before)
        try:
            return step()
        finally:
            sys.setprofile(before)

    core.step = noted
    try:
        llm.generate([[1, 2, 3], [4, 5, 6]], SamplingParams(temperature=0, max_tokens=2 * number, ignore_eos=True))
    finally:
        del core.step
    return [file for file in found if file]


@pytest.mark.parametrize(
    ("recorded", "launched"),
    [
        (True, ["worker/graph_runner.py", "worker/step_ring.py"]),
        # What a recording has launched once and for all.
        (False, ["worker/step_ring.py", "worker/program.py", "worker/sample.py"]),
    ],
)
def test_files_of_a_step(recorded: bool, launched: list[str], qwen3, open_llm) -> None:
    load_providers()
    llm = open_llm(
        qwen3, block_size=64, max_model_len=64, max_num_seqs=2, op_priority={name: ["torch"] for name in OPS}
    )
    if recorded:
        llm.engine.executor.runner.capture(16, ActingRecorder())
    found = files_of_a_step(llm, 6)
    print("", *(f"{file}{' (beside)' * (file in BESIDE)}" for file in found), sep="\n")
    passed = [file for file in found if file not in BESIDE]
    assert passed == [
        "engine/core.py",
        "engine/scheduler.py",
        "engine/plan_cache.py",
        "executors/in_process.py",
        "worker/model_runner.py",
        *launched,
        "engine/results.py",
        "engine/row_state.py",
    ]
    assert len(passed) <= (9 if recorded else 10)
