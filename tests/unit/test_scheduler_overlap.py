"""Two steps in flight, and requests that leave while their step is: aborts, stops, preemption."""

import numpy as np
import pytest
from fake_executor import Failures, undisturbed
from harness import Harness

from rapid_infer.errors import RequestError


def prompt(n: int, first: int = 0) -> list[int]:
    return [(first + i) % 50 for i in range(n)]


def stop_after(engine: Harness, name: str, tokens: list[int], n: int) -> list[int]:
    """Add a request that meets its stop token as its n-th; returns what it will generate."""
    probe = engine.add(name, tokens, 20)
    whole = undisturbed(probe)
    assert whole.index(whole[n - 1]) == n - 1
    probe.stop_token_ids = (whole[n - 1],)
    return whole[:n]


def step_until_ended(engine: Harness, name: str) -> None:
    for _ in range(100):
        if name in engine.ends:
            return
        engine.step()
    raise AssertionError(f"{name} did not end")


def until_preempted(engine: Harness) -> None:
    """Step until the step that preempts, included."""
    for _ in range(100):
        engine.step()
        if engine.scheduler.stats.preemptions:
            return
    raise AssertionError("nothing was preempted")


def test_the_next_step_is_launched_before_a_step_is_collected() -> None:
    engine = Harness(queue_depth=2)
    engine.add("a", prompt(5), 6)
    engine.run()
    # (collected step, newest launched step): the last one has nothing behind it.
    assert engine.executor.launches_at_collect == [(n, min(n + 1, 6)) for n in range(1, 7)]


def test_with_one_step_in_flight_each_is_collected_at_once() -> None:
    engine = Harness(queue_depth=1)
    engine.add("a", prompt(5), 6)
    engine.run()
    assert engine.executor.launches_at_collect == [(n, n) for n in range(1, 7)]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_token_is_computed_beyond_the_limit(depth: int) -> None:
    engine = Harness(queue_depth=depth)
    engine.add("a", prompt(5), 6)
    engine.run()
    assert len(engine.plans) == 6
    assert engine.reason("a") == "length"


def test_the_token_in_flight_after_a_stop_is_dropped() -> None:
    engine = Harness(queue_depth=2)
    expected = stop_after(engine, "a", prompt(5), 3)
    engine.run()
    assert engine.tokens["a"] == expected
    assert engine.reason("a") == "stop"
    assert len(engine.plans) == 4, "the step behind the stop was launched before it was known"


def test_a_late_result_never_goes_to_the_next_owner_of_the_row() -> None:
    engine = Harness(queue_depth=2, max_num_seqs=1)
    first = stop_after(engine, "first", prompt(5), 3)
    second = engine.add("second", prompt(5, 20), 4)
    step_until_ended(engine, "first")
    outputs = engine.step()
    assert second.row == 0
    assert engine.last_plan.rows.tolist() == [0]
    assert outputs.request_ids == [], "this step collected the first request's surplus token"
    engine.run()
    assert engine.tokens == {"first": first, "second": undisturbed(second)}


def test_blocks_of_a_step_in_flight_are_not_handed_out() -> None:
    engine = Harness(queue_depth=2, num_blocks=4, max_model_len=12, max_num_seqs=2)
    stop_after(engine, "first", prompt(5), 3)
    step_until_ended(engine, "first")
    assert engine.cache.num_free < engine.cache.num_usable
    everything = engine.cache.num_usable * 4
    assert engine.cache.can_grow([[]], everything, soon=True)
    assert not engine.cache.can_grow([[]], everything)
    engine.add("second", prompt(9, 20), 3)
    engine.run()
    assert engine.tokens["second"] == undisturbed(engine.requests["second"])


def test_abort_while_waiting() -> None:
    engine = Harness(max_num_seqs=1)
    engine.add("a", prompt(5), 6)
    engine.add("b", prompt(5), 6)
    engine.step()
    engine.core.abort(["b"])
    engine.run()
    assert (engine.reason("a"), engine.reason("b"), engine.tokens["b"]) == ("length", "abort", [])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(1, 7))
def test_abort_at_any_step_keeps_what_came_and_frees_the_rest(depth: int, steps: int) -> None:
    engine = Harness(queue_depth=depth, max_num_batched_tokens=8)
    engine.add("a", prompt(20), 10)
    other = engine.add("b", prompt(6, 30), 10)
    for _ in range(steps):
        engine.step()
    engine.core.abort(["a"])
    before = list(engine.tokens["a"])
    outputs = engine.step()
    assert "a" not in outputs.request_ids
    assert [finished.request_id for finished in outputs.finished] == ["a"]
    engine.run()
    assert engine.reason("a") == "abort"
    assert engine.tokens["a"] == before == undisturbed(engine.requests["a"])[: len(before)]
    assert engine.tokens["b"] == undisturbed(other)


def test_abort_when_the_end_is_already_in_flight_gives_one_terminal_event() -> None:
    engine = Harness(queue_depth=2)
    engine.add("a", prompt(5), 2)
    engine.step()
    engine.step()
    engine.core.abort(["a"])
    engine.run()
    assert engine.reason("a") == "abort"
    assert len(engine.tokens["a"]) == 1


def test_aborting_what_has_ended_or_never_was_does_nothing() -> None:
    engine = Harness()
    engine.add("a", prompt(5), 1)
    engine.run()
    engine.core.abort(["a", "nobody"])
    assert not engine.core.has_unfinished_requests()
    engine.add("b", prompt(5), 3)
    engine.step()
    engine.core.abort(["b", "b"])
    engine.run()
    assert engine.reason("b") == "abort"


def test_an_id_is_free_again_once_its_end_has_been_reported() -> None:
    engine = Harness()
    engine.add("a", prompt(5), 3)
    engine.core.abort(["a"])
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.core.add_request(engine.requests["a"])
    engine.step()
    del engine.ends["a"]
    engine.add("a", prompt(5), 3)
    engine.run()
    assert engine.tokens["a"] == undisturbed(engine.requests["a"])


def test_an_aborted_last_request_leaves_an_idle_engine() -> None:
    engine = Harness(queue_depth=2)
    engine.add("a", prompt(5), 9)
    engine.step()
    engine.core.abort(["a"])
    assert engine.core.has_unfinished_requests()
    engine.run()
    assert len(engine.plans) == 1


def test_a_request_preempted_with_a_token_in_flight_gets_that_token_and_waits_for_it() -> None:
    engine = Harness(queue_depth=2, block_size=4, num_blocks=9, max_model_len=32)
    requests = [engine.add(name, prompt(8, 20 * i), 20, share=None) for i, name in enumerate("ab")]
    until_preempted(engine)
    # What the step returned was in flight at the preemption.
    assert requests[1].in_flight == 0
    assert requests[1].num_tokens == 8 + len(engine.tokens["b"])
    engine.run()
    assert all(engine.tokens[r.request_id] == undisturbed(r) for r in requests)


def test_a_preempted_request_waits_for_its_token_even_when_the_next_launch_fails() -> None:
    def run(failures: Failures) -> Harness:
        engine = Harness(queue_depth=2, block_size=4, num_blocks=10, max_model_len=32, failures=failures)
        for i, name in enumerate("abc"):
            engine.add(name, prompt(8 - i, 11 * i), 20)
        until_preempted(engine)
        return engine

    # The first row needs a block, so the last one is preempted; the second one needs none and runs in this step.
    quiet = run(Failures())
    assert quiet.last_plan.rows.tolist() == [1]
    preempted_at = quiet.scheduler.last_step
    engine = run(Failures(launch=lambda step: step == preempted_at))
    assert engine.requests["c"].in_flight == 1
    assert list(engine.ends) == ["b"]
    engine.run()
    assert [engine.reason(name) for name in "abc"] == ["length", "error", "length"]
    for name in "ac":
        assert engine.tokens[name] == undisturbed(engine.requests[name])


def test_a_request_is_not_admitted_while_a_token_of_it_is_in_flight() -> None:
    engine = Harness(queue_depth=2)
    request = engine.add("a", prompt(5), 3)
    # As a preemption leaves it: the token would be missing from what is computed again.
    request.in_flight = 1
    assert engine.scheduler.schedule() is None
    request.in_flight = 0
    engine.run()
    assert engine.tokens["a"] == undisturbed(request)


def test_a_stop_token_in_flight_ends_a_preempted_request() -> None:
    engine = Harness(queue_depth=2, block_size=4, num_blocks=9, max_model_len=32)
    engine.add("a", prompt(8), 20, share=None)
    victim = engine.add("b", prompt(8, 20), 20, share=None)
    whole = undisturbed(victim)
    until_preempted(engine)
    # Run again, with the token that was in flight at the preemption as the stop token.
    step = len(engine.tokens["b"]) - 1
    assert whole.index(whole[step]) == step
    again = Harness(queue_depth=2, block_size=4, num_blocks=9, max_model_len=32)
    again.add("a", prompt(8), 20, share=None)
    again.add("b", prompt(8, 20), 20, share=None, stop=(whole[step],))
    again.run()
    assert again.scheduler.stats.preemptions == 1
    assert again.reason("b") == "stop"
    assert again.tokens["b"] == whole[: step + 1]
    assert sum(p.new_rows is not None for p in again.plans) == 1, "it never came back"


def test_a_row_with_non_finite_logits_in_flight_while_its_request_is_preempted() -> None:
    def last_row_of_the_step_before(plan: object) -> np.ndarray:
        failing = getattr(plan, "step", 0) == fail_at
        sampled = getattr(plan, "sampled", ())
        return np.array([failing and i == 1 for i in sampled], bool)

    fail_at = 0
    quiet = Harness(queue_depth=2, block_size=4, num_blocks=9, max_model_len=32)
    for i, name in enumerate("ab"):
        quiet.add(name, prompt(8, 20 * i), 20, share=None)
    until_preempted(quiet)
    fail_at = quiet.scheduler.last_step
    engine = Harness(
        queue_depth=2,
        block_size=4,
        num_blocks=9,
        max_model_len=32,
        failures=Failures(rows=last_row_of_the_step_before),
    )
    for i, name in enumerate("ab"):
        engine.add(name, prompt(8, 20 * i), 20, share=None)
    engine.run()
    assert engine.scheduler.stats.preemptions == 1
    assert (engine.reason("a"), engine.reason("b")) == ("length", "error")
