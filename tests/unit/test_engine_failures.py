"""Forwards that raise, logits that are not finite, lost devices: who ends, who goes on, and what is left behind."""

import numpy as np
import pytest
from fake_executor import Failures, undisturbed
from harness import Harness

from rapid_infer.errors import EngineDeadError, RequestError


def prompt(n: int, first: int = 0) -> list[int]:
    return [(first + i) % 50 for i in range(n)]


def failing(stage: str, step: int) -> Failures:
    return Failures(**{stage: lambda n: n == step})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stage", ["launch", "collect"])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_failed_step_ends_its_requests_and_the_next_one_works(depth: int, stage: str, step: int) -> None:
    engine = Harness(queue_depth=depth, failures=failing(stage, step), max_num_batched_tokens=8)
    for i, name in enumerate("ab"):
        engine.add(name, prompt(6, 20 * i), 8)
    engine.run()
    for name in "ab":
        assert engine.reason(name) == "error"
        assert engine.ends[name].error == f"the forward pass raised RuntimeError: {stage} of step {step}"
        assert engine.tokens[name] == undisturbed(engine.requests[name])[: len(engine.tokens[name])]
    again = engine.add("again", prompt(6), 8)
    engine.run()
    assert engine.tokens["again"] == undisturbed(again)


def test_requests_outside_the_failed_step_go_on() -> None:
    engine = Harness(failures=failing("launch", 1), max_num_batched_tokens=8, max_num_seqs=2)
    for i, name in enumerate("abc"):
        engine.add(name, prompt(8, 10 * i), 3)
    engine.run()
    assert [engine.reason(name) for name in "abc"] == ["error", "length", "length"]


@pytest.mark.parametrize("stage", ["launch", "collect"])
def test_what_a_failed_step_should_have_written_is_never_hit(stage: str) -> None:
    engine = Harness(failures=failing(stage, 1))
    engine.add("a", prompt(20), 3)
    engine.run()
    engine.add("b", prompt(20), 3)
    engine.run()
    assert (engine.ends["b"].num_cached_tokens, engine.tokens["b"]) == (0, undisturbed(engine.requests["b"]))


def test_a_request_that_left_before_its_step_failed_offers_no_blocks_either() -> None:
    engine = Harness(queue_depth=2, failures=failing("collect", 1))
    engine.add("a", prompt(20), 3)
    engine.step()
    engine.core.abort(["a"])
    engine.run()
    engine.add("b", prompt(20), 3)
    engine.run()
    assert (engine.reason("a"), engine.ends["b"].num_cached_tokens) == ("abort", 0)


def test_blocks_of_earlier_steps_stay_cached_when_only_later_requests_fail() -> None:
    engine = Harness(failures=failing("launch", 2))
    engine.add("a", prompt(20), 1)
    engine.run()
    engine.add("b", prompt(9, 30), 1)
    engine.run()
    engine.add("c", prompt(20), 1)
    engine.run()
    assert (engine.reason("b"), engine.ends["c"].num_cached_tokens) == ("error", 16)


def test_a_row_with_non_finite_logits_ends_alone() -> None:
    engine = Harness(failures=Failures(rows=lambda plan: (plan.sampled == 1) & (plan.step == 3)))
    for i, name in enumerate("abc"):
        engine.add(name, prompt(6, 10 * i), 6)
    engine.run()
    assert [engine.reason(name) for name in "abc"] == ["length", "error", "length"]
    assert engine.ends["b"].error == "the model gave non-finite logits (NaN or infinity) for this request"
    assert len(engine.tokens["b"]) == 2
    for name in "ac":
        assert engine.tokens[name] == undisturbed(engine.requests[name])
    engine.add("d", prompt(6, 10), 2)
    engine.run()
    assert engine.ends["d"].num_cached_tokens == 0, "the blocks of a failed row are not offered"


def test_all_rows_of_a_step_may_fail() -> None:
    engine = Harness(queue_depth=2, failures=Failures(rows=lambda plan: np.full(len(plan.sampled), plan.step == 2)))
    for i, name in enumerate("ab"):
        engine.add(name, prompt(6, 10 * i), 6)
    engine.run()
    assert [engine.reason(name) for name in "ab"] == ["error", "error"]


@pytest.mark.parametrize("stage", ["launch", "collect"])
def test_a_lost_device_kills_the_engine_and_later_calls_say_why(stage: str) -> None:
    engine = Harness(failures=failing(stage, 2))
    request = engine.add("a", prompt(6), 6)
    engine.step()
    engine.executor.is_healthy = False
    cause = f"the forward pass raised RuntimeError: {stage} of step 2"
    with pytest.raises(EngineDeadError, match=f"the engine cannot go on: {cause}") as caught:
        engine.step()
    assert isinstance(caught.value.__cause__, RuntimeError)
    for call in (engine.core.step, lambda: engine.core.add_request(request)):
        with pytest.raises(EngineDeadError, match=f"the engine is dead: {cause}"):
            call()
    engine.core.abort(["a"])
    engine.core.close()


def test_a_closed_engine_says_so() -> None:
    engine = Harness()
    request = engine.add("a", prompt(6), 6)
    engine.step()
    engine.core.close()
    for call in (engine.core.step, lambda: engine.core.add_request(request), engine.core.reset_prefix_cache):
        with pytest.raises(EngineDeadError, match="the engine was closed; make a new one"):
            call()
    engine.core.abort(["a"])
    engine.core.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("stage", ["launch", "collect"])
def test_an_interrupt_reaches_the_caller_and_leaves_a_working_engine(
    depth: int, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Harness(queue_depth=depth)
    engine.add("a", prompt(20), 6)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            # With two steps in flight the first call only launches.
            engine.run()
    engine.executor._queue.clear()
    engine.run()
    assert engine.reason("a") == "error"
    engine.add("b", prompt(20), 6)
    engine.run()
    assert engine.ends["b"].num_cached_tokens == 0
    assert engine.tokens["b"] == undisturbed(engine.requests["b"])


def test_an_engine_whose_requests_can_never_run_says_so_instead_of_spinning() -> None:
    engine = Harness(num_blocks=3, block_size=4, max_model_len=64)
    engine.add("a", prompt(20), 3)
    with pytest.raises(EngineDeadError, match="1 waiting, 0 running, 2 of 2 blocks free"):
        engine.step()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "the prompt is empty: got 0 tokens, expected at least 1"),
        (prompt(64), "the prompt has 64 tokens, but max_model_len=64 leaves room for at most 63"),
        ([1, 50], "token id 50 is outside the vocabulary: expected 0 to 49"),
        ([-1, 3], "token id -1 is outside the vocabulary"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused_and_leaves_nothing(tokens: list[int], message: str) -> None:
    engine = Harness()
    with pytest.raises(RequestError, match=message):
        engine.add("a", tokens)
    assert not engine.core.has_unfinished_requests()
    engine.add("a", prompt(63), 1)
    engine.run()


def test_an_id_in_use_is_refused_and_the_first_request_is_unaffected() -> None:
    engine = Harness()
    first = engine.add("a", prompt(5), 3)
    with pytest.raises(RequestError, match="request id 'a' is in use; expected a new one"):
        engine.core.add_request(first)
    engine.run()
    assert engine.tokens["a"] == undisturbed(first)
