"""One `LLM` in several threads, in forked processes, after interrupts and after its end: right tokens or one error."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import rapid_infer
from rapid_infer import LLM, SamplingParams
from rapid_infer.errors import EngineDeadError, RapidInferError, RequestError
from rapid_infer.testing import TINY, make_checkpoint

ROOT = Path(rapid_infer.__file__).parent
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "dtype": "float32", "max_model_len": 64}
PARAMS = SamplingParams(temperature=0, max_tokens=8)
SHORT = SamplingParams(temperature=0, max_tokens=3, n=2)


def prompt(i: int) -> list[int]:
    return list(range(7 * i, 7 * i + 20 + i))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import Qwen3Config

    return str(make_checkpoint(tmp_path_factory.mktemp("model"), Qwen3Config(**TINY, head_dim=16)))


@pytest.fixture(scope="module")
def shared(path: str) -> Iterator[LLM]:
    with LLM(path, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    core = shared.engine.core
    # Reports what was aborted.
    core.step()
    core.check_integrity()
    assert not shared.engine.has_unfinished_requests()
    assert not core.has_unfinished_requests()
    assert core.cache.num_free == core.cache.num_usable


def whole(llm: LLM, ids: list[int]) -> list[int]:
    (output,) = llm.generate(ids, PARAMS)
    return output.outputs[0].token_ids


def streamed(llm: LLM, ids: list[int]) -> list[int]:
    return [token for output in llm.stream(ids, PARAMS) for token in output.outputs[0].token_ids]


def left_early(llm: LLM, ids: list[int]) -> list[int]:
    stream = llm.stream(ids, PARAMS)
    first = next(stream).outputs[0].token_ids
    stream.close()
    return first


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each of them returned, or raised, all having begun together."""
    results: list[Any] = [None] * len(calls)
    together = threading.Barrier(len(calls))

    def run(i: int) -> None:
        together.wait()
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "hangs"
    return results


def test_what_several_threads_ask_for_is_right_and_runs_together(llm: LLM) -> None:
    expected = [whole(llm, prompt(i)) for i in range(6)]
    llm.reset_prefix_cache()
    steps = llm.engine.core.scheduler.stats.steps
    ways = [whole, streamed, left_early] * 2
    for _ in range(3):
        results = in_threads([lambda i=i: ways[i](llm, prompt(i)) for i in range(6)])
        assert results == [tokens[:1] if ways[i] is left_early else tokens for i, tokens in enumerate(expected)]
    assert llm.engine.core.scheduler.stats.steps - steps < 3 * 4 * PARAMS.max_tokens, "one after the other"


def test_a_thread_that_steps_in_a_loop_gives_way_to_one_that_waits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    napped = threading.Event()
    monkeypatch.setattr("rapid_infer.exclusive.time.sleep", lambda seconds: (naps.append(seconds), napped.set()))
    with llm.engine._lock:
        waiting = threading.Thread(target=llm.engine.step)
        waiting.start()
        while not llm.engine._callers:
            pass
        looping = threading.Thread(target=llm.engine.step)
        looping.start()
        assert napped.wait(20)
    waiting.join()
    looping.join()
    assert len(naps) == 1
    llm.engine.step()
    assert len(naps) == 1, "there is nobody to give way to"


def test_a_call_from_within_a_call_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(llm, prompt(0))
    stream = llm.stream(prompt(1), PARAMS)
    next(stream)
    refused: list[Exception] = []
    original = llm.engine.core.step

    def step() -> Any:
        # As a finalizer would, and a signal handler.
        stream.close()
        for call in (lambda: whole(llm, prompt(2)), lambda: llm.stream(prompt(2))):
            try:
                call()
            except RequestError as error:
                refused.append(error)
        return original()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core, "step", step)
        assert in_threads([lambda: whole(llm, prompt(0))]) == [expected], "hangs"
    assert "from within one of its own calls" in str(refused[0])
    assert len(refused) == 2 * PARAMS.max_tokens
    # What was left in the middle of a step is ended by the next call.
    assert whole(llm, prompt(0)) == expected


@pytest.mark.parametrize("started", [False, True])
def test_a_stream_that_nobody_holds_is_no_longer_in_the_engine(llm: LLM, started: bool) -> None:
    stream = llm.stream(prompt(0), PARAMS)
    assert llm.engine.has_unfinished_requests()
    if started:
        next(stream)
    in_threads([stream.close])
    del stream
    gc.collect()
    assert not llm.engine.has_unfinished_requests()


def test_a_refused_stream_raises_at_once_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.stream([10**6], PARAMS)


def test_an_interrupted_call_ends_the_requests_of_others_in_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(llm, prompt(0))
    streams = [llm.stream(prompt(i), PARAMS) for i in range(3)]
    next(streams[1])

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.core.scheduler, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            whole(llm, prompt(4))
    for stream in streams:
        *_, output = stream
        (completion,) = output.outputs
        assert (completion.finish_reason, completion.token_ids) == ("error", [])
        assert "interrupted in the middle of a step" in str(completion.error)
    assert whole(llm, prompt(0)) == expected


FILES = {str(ROOT / name) for name in ("llm.py", "llm_engine.py", "frontend/outputs.py", "frontend/inputs.py")}


def at_line(number: int, run: Callable[[], Any]) -> int:
    """Run with an interrupt before the line of FILES that comes as this number; returns how many came."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return seen


def test_an_interrupt_at_any_line_leaves_others_with_an_end_and_the_engine_working(llm: LLM) -> None:
    expected = [output.outputs[1].token_ids for output in llm.generate([prompt(0), prompt(1)], SHORT)]

    def call() -> None:
        llm.generate([prompt(0)], SHORT)

    for number in range(1, at_line(0, call) + 1):
        stream = llm.stream(prompt(1), SHORT)
        at_line(number, call)
        got: list[int] = []
        for output in stream:
            got += [token for one in output.outputs if one.index == 1 for token in one.token_ids]
        assert output.finished
        reasons = {one.finish_reason for one in output.outputs}
        assert got == expected[1] if reasons == {"length"} else reasons == {"error"}
        assert [o.outputs[1].token_ids for o in llm.generate([prompt(0)], SHORT)] == expected[:1]


def test_after_close_every_call_raises(path: str) -> None:
    llm = LLM(path, **OPTIONS)
    begun, waiting = llm.stream(prompt(0)), llm.stream(prompt(1))
    next(begun)
    llm.close()
    llm.close()
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(prompt(0)),
        lambda: llm.generate([]),
        lambda: llm.stream(prompt(0)),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.encode_chat([{"role": "user", "content": "hi"}]),
        llm.reset_prefix_cache,
        lambda: list(begun),
        lambda: list(waiting),
        lambda: llm.engine.add_request("a", prompt(0)),
        lambda: llm.engine.abort(["a"]),
        lambda: llm.engine.encode(prompt(0)),
        llm.engine.step,
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match="the engine was closed; make a new one"):
            call()


def in_fork(work: Callable[[], str]) -> str:
    """What `work` returns in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, "hangs"
    return text


@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_process_is_told_to_spawn(llm: LLM, busy: bool) -> None:
    stream = llm.stream(prompt(0), PARAMS)

    def work() -> str:
        errors = []
        for call in (lambda: llm.generate(prompt(1)), lambda: llm.stream(prompt(1)), lambda: next(stream)):
            try:
                call()
            except RapidInferError as error:
                errors.append(str(error))
        stream.close()
        llm.close()
        return "\n".join(errors)

    if busy:
        # Another thread is in the middle of a step, and does not exist in the child.
        with llm.engine._lock:
            texts = in_fork(work).splitlines()
    else:
        texts = in_fork(work).splitlines()
    assert len(texts) == 3
    assert all("which was forked from it" in text and "get_context('spawn')" in text for text in texts)
    assert len([output for output in stream]) == PARAMS.max_tokens
