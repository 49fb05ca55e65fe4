"""An interrupt or a lack of memory at any line of the engine: what runs next is right, and nothing is left behind."""

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fake_executor
import pytest
from fake_executor import VOCAB, undisturbed
from harness import Harness

import rapid_infer
from rapid_infer.engine.masks import AllowedTokens
from rapid_infer.params import SamplingParams

ROOT = Path(rapid_infer.__file__).parent
FILES = {str(path) for folder in ("engine", "cache") for path in (ROOT / folder).glob("*.py")}

Line = tuple[str, int]


class Everything(AllowedTokens):
    """Asked for anew before each token."""

    changes = True

    def __init__(self) -> None:
        super().__init__(range(VOCAB), VOCAB)


def prompt(n: int, first: int = 0) -> list[int]:
    return [(first + i) % VOCAB for i in range(n)]


def everything(engine: Harness) -> None:
    """Shared prefixes, prompts in pieces, preemption, steady rows, masks, an abort."""
    engine.add("long", prompt(20), 11)
    engine.add("shared", prompt(17), 6, stop=(3, 4))
    engine.step()
    engine.add("masked", prompt(5, 30), 3, mask=Everything(), params=SamplingParams(temperature=0.5, logit_bias={3: 1}))
    engine.add("late", prompt(9, 40), 12)
    engine.add("aborted", prompt(5, 9), 9)
    for _ in range(8):
        engine.step()
    engine.core.abort(["aborted"])
    engine.core.reset_prefix_cache()
    while engine.core.has_unfinished_requests():
        engine.step()


def new_engine(queue_depth: int) -> Harness:
    options = {"num_blocks": 12, "max_num_batched_tokens": 12, "max_num_seqs": 4, "max_model_len": 32}
    return Harness(queue_depth=queue_depth, **options)


def lines_of(
    run: Callable[[], Any], at: int | None = None, error: type[BaseException] = KeyboardInterrupt
) -> list[Line]:
    """The lines of FILES that `run` comes to, in order; before the one with number `at`, `error` is raised."""
    seen: list[Line] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        caller = frame.f_back
        if frame.f_code.co_filename not in FILES or (caller and caller.f_code.co_filename == fake_executor.__file__):
            return None
        if event == "line":
            if len(seen) == at:
                raise error
            seen.append((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return seen


def places(lines: list[Line]) -> list[int]:
    """Where each line is met, for the first time or for the last: two lines of each in turn."""
    first = {line: i for i, line in reversed(list(enumerate(lines)))}
    last = {line: i for i, line in enumerate(lines)}
    return sorted((first, last)[i // 2 % 2][line] for i, line in enumerate(first))


def hands_out(line: Line) -> bool:
    """Nothing is called between what hands the outputs out and this line, so no interrupt comes here."""
    path, number = line
    return path.endswith("core.py") and Path(path).read_text().splitlines()[number - 1].strip() == "return outputs"


@pytest.mark.parametrize("quarter", [0, 1, *(pytest.param(one, marks=pytest.mark.slow) for one in (2, 3))])
def test_whatever_is_raised_at_any_line_the_next_run_is_right(quarter: int) -> None:
    queue_depth = 1 + quarter % 2
    engine = new_engine(queue_depth)
    lines = lines_of(lambda: everything(engine))
    assert engine.scheduler.stats.preemptions, "not everything happened"
    assert {Path(path).name for path, _ in lines} > {
        "scheduler.py",
        "plan_cache.py",
        "plan_builder.py",
        "block_pool.py",
    }
    # Each depth has the half of the lines that the other has not.
    for i, at in enumerate(places(lines)[quarter::4]):
        if hands_out(lines[at]):
            continue
        engine = new_engine(queue_depth)
        error = (KeyboardInterrupt, MemoryError)[i // 2 % 2]
        with contextlib.suppress(KeyboardInterrupt, MemoryError):
            lines_of(functools.partial(everything, engine), at, error)
        finish(engine, f"{error.__name__} at {lines[at]}")


def interrupted() -> Harness:
    """A step of several requests was cut short, one of which had just ended and one had been aborted."""
    engine = new_engine(2)
    for name, length in (("a", 6), ("b", 9), ("c", 3)):
        engine.add(name, prompt(length, length), 1 if name == "c" else 8)
    engine.step()
    engine.core.abort(["a"])

    def cut_short(step: int) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.cache, "collected", cut_short)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    return engine


def test_what_is_left_after_an_interrupt_may_be_interrupted_as_well() -> None:
    engine = interrupted()
    lines = lines_of(engine.step)
    finish(engine, "once")
    assert [engine.reason(name) for name in "abc"] == ["abort", "error", "error"]
    for at in sorted({line: i for i, line in reversed(list(enumerate(lines)))}.values()):
        if not hands_out(lines[at]):
            engine = interrupted()
            with contextlib.suppress(KeyboardInterrupt):
                lines_of(engine.step, at)
            finish(engine, f"twice, then at {lines[at]}")
            assert [engine.reason(name) for name in "abc"] == ["abort", "error", "error"]


def finish(engine: Harness, where: str) -> None:
    for _ in range(100):
        if engine.core.has_unfinished_requests():
            engine.step()
    assert not engine.core.has_unfinished_requests(), where
    # One whose `add` was cut short may end as well.
    assert engine.requests.keys() <= engine.ends.keys(), where
    assert engine.cache.num_free == engine.cache.num_usable, where
    engine.ends = {name: engine.ends[name] for name in engine.requests}
    for name, request in engine.requests.items():
        expected, got = undisturbed(request), engine.tokens[name]
        assert got == expected[: len(got)], where
        assert engine.reason(name) in ("error", "abort") or got == expected, where
    before = list(engine.requests.values())
    for request in before:
        engine.add(f"again-{request.request_id}", request.prompt_token_ids.tolist(), 3)
    engine.run()
    for request in before:
        again = engine.requests[f"again-{request.request_id}"]
        assert engine.tokens[again.request_id] == undisturbed(again), where
        assert engine.reason(again.request_id) == "length", where
