"""What runs in which step. Claims are read off the StepPlans; the fake device checks each plan on its own besides."""

from collections.abc import Sequence

import numpy as np
import pytest
from fake_executor import SPEC, VOCAB, ToyKV, ToyState, undisturbed
from harness import GREEDY, Harness

from rapid_infer.cache import prefix
from rapid_infer.cache.spec import MLAKV, CacheGroup
from rapid_infer.config import CheckpointInfo, DeviceInfo, EngineArgs
from rapid_infer.params import SamplingParams


def prompt(n: int, first: int = 0) -> list[int]:
    return [(first + i) % 50 for i in range(n)]


def cached_at_admission(engine: Harness) -> dict[int, int]:
    """Of every row that started in the last step: tokens that it found in the cache."""
    new = engine.last_plan.new_rows
    return {} if new is None else dict(zip(new.rows.tolist(), new.computed.tolist()))


def test_a_long_prompt_is_split_over_steps_and_samples_after_the_last_piece() -> None:
    engine = Harness(max_num_batched_tokens=8)
    engine.add("a", prompt(20), 3)
    engine.run()
    assert [plan.query_lens.tolist() for plan in engine.plans] == [[8], [8], [4], [1], [1]]
    assert [plan.sampled.tolist() for plan in engine.plans] == [[], [], [0], [0], [0]]


def test_the_budget_is_used_up_and_never_exceeded() -> None:
    engine = Harness(max_num_batched_tokens=8)
    for i in range(5):
        engine.add(str(i), prompt(9, i), 2, share=None)
    engine.run()
    used = [plan.num_tokens for plan in engine.plans]
    assert max(used) == 8
    assert used[:5] == [8] * 5


def test_a_late_request_gets_tokens_before_an_old_long_one_ends() -> None:
    engine = Harness(max_num_batched_tokens=8)
    engine.add("old", prompt(20), 30)
    engine.step()
    late = engine.add("late", prompt(20, 7), 2)
    engine.run()
    served = [i for i, plan in enumerate(engine.plans) if len(plan.rows) == 2]
    assert late.num_preemptions == 0
    # The old prompt needs steps 0 to 2; the late one starts in what step 2 leaves and does not wait for the old one.
    assert served[0] == 2
    assert len(engine.plans) > served[-1] + 20
    assert engine.plans[served[-1]].query_lens.tolist() == [1, 1]


def test_running_rows_get_their_token_before_a_new_prompt_gets_the_rest() -> None:
    engine = Harness(max_num_batched_tokens=8)
    engine.add("a", prompt(4), 9)
    engine.step()
    engine.add("b", prompt(20, 9), 3)
    engine.step()
    assert engine.lens() == {0: 1, 1: 7}


def test_single_tokens_stand_before_longer_queries_and_decode_keeps_the_order_of_admission() -> None:
    engine = Harness(max_num_batched_tokens=8)
    for i, length in enumerate((3, 12, 2)):
        engine.add(str(i), prompt(length, 10 * i), 12)
    for _ in range(3):
        engine.step()
    # Row 0 decodes while row 1 takes 5 and then 7 tokens of its prompt; row 2 starts with what the third step leaves.
    assert [plan.rows.tolist() for plan in engine.plans] == [[0, 1], [0, 1], [0, 1, 2]]
    assert [plan.query_lens.tolist() for plan in engine.plans] == [[3, 5], [1, 7], [1, 1, 2]]
    engine.add("3", prompt(1, 40), 12)
    engine.add("4", prompt(3, 41), 12)
    engine.step()
    assert engine.last_plan.rows.tolist() == [0, 1, 2, 3, 4]


def test_without_chunked_prefill_prompts_run_whole_or_wait() -> None:
    engine = Harness(max_num_batched_tokens=64, enable_chunked_prefill=False)
    for i, length in enumerate((40, 30, 34)):
        engine.add(str(i), prompt(length, i), 2)
    engine.run()
    assert [plan.query_lens.tolist() for plan in engine.plans] == [[40], [1, 30], [1, 34], [1]]


def test_a_request_admitted_beside_the_last_piece_of_the_same_prompt_shares_it() -> None:
    engine = Harness(block_size=4, max_num_batched_tokens=12)
    engine.add("first", prompt(20), 3)
    engine.step()
    second = engine.add("second", prompt(20), 3)
    engine.step()
    assert engine.last_plan.query_lens.tolist() == [8, 4]
    assert second.num_cached_tokens == 16
    engine.run()


@pytest.mark.parametrize("length", range(1, 22))
def test_cached_tokens_are_whole_blocks_and_never_the_whole_prompt(length: int) -> None:
    engine = Harness(block_size=4)
    engine.add("first", prompt(16), 1)
    engine.run()
    request = engine.add("second", prompt(length), 1)
    engine.run()
    expected = min((length - 1) // 4 * 4, 16)
    assert request.num_cached_tokens == engine.ends["second"].num_cached_tokens == expected
    assert cached_at_admission(engine) == {0: expected}
    assert engine.lens() == {0: length - expected}


@pytest.mark.parametrize("share", [b"", b"key", None])
@pytest.mark.parametrize("length", [3, 4, 13, 16, 17])
@pytest.mark.parametrize("changed", [None, 0, 3, 4, 9, 15])
def test_hashes_taken_over_from_the_request_before_are_its_own(
    changed: int | None, length: int, share: bytes | None
) -> None:
    engine = Harness(block_size=4)
    engine.add("first", prompt(16), 6)
    engine.step()
    ids = prompt(length)
    if changed is not None and changed < length:
        ids[changed] += 1
    request = engine.add("second", ids, 1, share=share)
    engine.run()
    expected: list[bytes] = []
    if share is not None:
        prefix.extend(expected, prefix.root(4, share), ids, 4)
    assert request.block_hashes[: length // 4] == expected


def test_equal_ids_with_other_images_share_only_what_stands_before_them() -> None:
    engine = Harness(block_size=4)
    for name, digest in (("a", b"cat"), ("b", b"dog"), ("c", b"cat")):
        engine.add(name, prompt(21), 2, extras=(prefix.HashExtra(9, 14, digest),))
        engine.step()
    # Hashes of the first two blocks were taken over from the request before.
    assert [engine.requests[name].num_cached_tokens for name in "abc"] == [0, 8, 20]
    engine.run()
    for name, other in ("ab", "bc"):
        first, second = engine.requests[name].block_hashes, engine.requests[other].block_hashes
        assert [x == y for x, y in zip(first, second)] == [True, True, False, False, False]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("drafts", [0, 2])
def test_generated_tokens_are_shared_as_well(drafts: int, block_size: int, depth: int) -> None:
    engine = Harness(block_size=block_size, queue_depth=depth, drafts=drafts)
    first = engine.add("first", prompt(6), 11)
    for n in range(5):
        # Whoever is admitted finds named what is certain by then.
        engine.step()
        engine.add(f"other {n}", [n + 40], 1)
    engine.run()
    whole = first.tokens(0, first.num_tokens).tolist()
    second = engine.add("second", whole, 1)
    engine.run()
    # The last of the 17 tokens was sampled but never computed.
    assert second.num_cached_tokens == 16


@pytest.mark.parametrize("share", [(None, None), (b"x", None), (b"x", b"y")])
def test_other_cache_salts_share_nothing(share: tuple[bytes | None, bytes | None]) -> None:
    engine = Harness()
    for name, key in zip("ab", share):
        engine.add(name, prompt(20), 1, share=key)
        engine.run()
    assert engine.ends["b"].num_cached_tokens == 0


def test_requests_admitted_together_share_the_blocks_that_the_first_will_fill() -> None:
    engine = Harness(block_size=4)
    engine.add("a", prompt(18), 3)
    engine.add("b", prompt(18), 3)
    engine.add("c", prompt(11), 3)
    engine.step()
    assert cached_at_admission(engine) == {0: 0, 1: 16, 2: 8}
    assert engine.lens() == {0: 18, 1: 2, 2: 3}
    engine.run()
    assert engine.tokens["a"] == engine.tokens["b"] == undisturbed(engine.requests["a"])


def test_a_block_is_offered_only_as_far_as_it_is_filled() -> None:
    engine = Harness(block_size=4, max_num_batched_tokens=10)
    engine.add("a", prompt(20), 3)
    engine.step()
    engine.add("b", prompt(20), 3)
    engine.step()
    assert engine.lens() == {0: 10}
    engine.step()
    assert cached_at_admission(engine) == {1: 16}


def test_the_n_rows_of_one_prompt_hold_its_blocks_once() -> None:
    engine = Harness(block_size=4, num_blocks=16)
    params = SamplingParams(n=3)
    for i in range(3):
        engine.add(f"r/{i}", prompt(17), 4, share=b"request 0", params=params, sample_index=i)
    engine.step()
    assert engine.cache.num_usable - engine.cache.num_free == 4 + 3
    assert engine.last_plan.new_rows is not None
    assert engine.last_plan.new_rows.settings["sample_index"].tolist() == [0, 1, 2]
    engine.run()


def test_a_prompt_starts_only_when_all_of_it_has_room() -> None:
    engine = Harness(block_size=4, num_blocks=9, max_model_len=32, max_num_batched_tokens=8)
    engine.add("a", prompt(16), 4, share=None)
    engine.add("b", prompt(20, 20), 4, share=None)
    for _ in range(3):
        engine.step()
    assert engine.lens() == {0: 1}, "budget and blocks for a first piece are there, but not for the whole"
    engine.run()
    assert engine.scheduler.stats.preemptions == 0


def test_preemption_frees_the_latest_row_and_recomputes_its_tokens() -> None:
    engine = Harness(block_size=4, num_blocks=9, max_model_len=32)
    requests = [engine.add(name, prompt(8, 20 * i), 20, share=None) for i, name in enumerate("ab")]
    for _ in range(20):
        engine.step()
        if engine.scheduler.stats.preemptions:
            break
    assert [r.num_preemptions for r in requests] == [0, 1]
    assert engine.scheduler.waiting[0] is requests[1]
    generated = len(engine.tokens["b"])
    assert generated > 0
    engine.run()
    again = [p for p in engine.plans if p.new_rows is not None][-1]
    assert again.query_lens.max() == 8 + generated, "prompt and generated tokens run again as one prompt"
    assert all(engine.tokens[r.request_id] == undisturbed(r) for r in requests)


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    engine = Harness(block_size=4, num_blocks=9, max_model_len=32)
    requests = [engine.add(name, prompt(8, 20 * i), 20) for i, name in enumerate("ab")]
    engine.run()
    last = [p for p in engine.plans if p.new_rows is not None][-1]
    assert last.new_rows is not None
    assert last.new_rows.computed.max() > 0
    assert requests[1].num_cached_tokens == 0, "its own blocks are no saving for the user"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_finds_the_blocks_of_what_it_generated_too(depth: int) -> None:
    engine = Harness(block_size=4, num_blocks=10, max_model_len=40, queue_depth=depth)
    for i, name in enumerate("ab"):
        engine.add(name, prompt(4, 20 * i), 16)
    engine.run()
    again = [p for p in engine.plans if p.new_rows is not None][-1]
    assert again.new_rows is not None
    assert (again.new_rows.computed.tolist(), again.query_lens.tolist()) == ([16], [1])


@pytest.mark.parametrize("steps", range(8, 15))
def test_every_block_is_offered_though_its_last_token_is_in_flight_when_others_are_admitted(steps: int) -> None:
    engine = Harness(queue_depth=2)
    engine.add("a", prompt(4), 20)
    for _ in range(steps):
        engine.step()
    engine.add("b", prompt(3, 30), 2)
    engine.run()
    engine.add("c", prompt(4) + engine.tokens["a"], 1)
    engine.run()
    # All but the last token of "a", which was never computed.
    assert engine.ends["c"].num_cached_tokens == 20


def test_preempted_requests_come_back_in_their_order_and_before_waiting_ones() -> None:
    engine = Harness(block_size=4, num_blocks=11, max_model_len=40, max_num_seqs=3)
    requests = [engine.add(name, prompt(8, 11 * i), 20, share=None) for i, name in enumerate("abcd")]
    engine.run()
    assert engine.scheduler.stats.preemptions >= 2
    assert list(engine.ends) == ["a", "b", "c", "d"]
    assert all(engine.tokens[r.request_id] == undisturbed(r) for r in requests)


def test_one_row_serves_requests_one_after_another() -> None:
    engine = Harness(max_num_seqs=1)
    for name in "abc":
        engine.add(name, prompt(5, ord(name)), 3)
    engine.run()
    assert all(plan.rows.tolist() == [0] for plan in engine.plans)
    assert list(engine.ends) == ["a", "b", "c"]
    assert len(engine.plans) == 9


def test_a_request_of_the_full_length_computes_all_but_its_last_token() -> None:
    engine = Harness(max_model_len=16, num_blocks=5, block_size=4)
    request = engine.add("a", prompt(15), 1)
    other = engine.add("b", prompt(1), 15)
    engine.run()
    assert (request.num_tokens, other.num_tokens) == (16, 16)
    assert [engine.reason(name) for name in "ab"] == ["length", "length"]
    assert max(plan.max_seq_len for plan in engine.plans) == 15


def test_a_stop_token_ends_the_request_and_is_kept() -> None:
    engine = Harness()
    whole = undisturbed(engine.add("probe", prompt(5), 10))
    stop = whole[3]
    engine.add("a", prompt(5), 10, stop=(49, stop) if stop != 49 else (stop,))
    engine.add("b", prompt(5), 10)
    engine.run()
    assert engine.tokens["a"] == whole[: whole.index(stop) + 1]
    assert (engine.reason("a"), engine.reason("b")) == ("stop", "length")
    assert engine.tokens["b"] == whole


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    engine = Harness()
    whole = undisturbed(engine.add("probe", prompt(5), 3))
    engine.add("a", prompt(5), 3, stop=(whole[2],))
    engine.run()
    assert engine.reason("a") == "stop"


def test_a_long_list_of_stop_tokens_is_forgotten_with_its_request() -> None:
    engine = Harness()
    whole = undisturbed(engine.add("a", prompt(5), 20))
    many = tuple(range(1000, 1100))
    engine.requests["a"].stop_token_ids = (whole[8],)
    engine.add("b", prompt(5, 20), 3, stop=many)
    engine.step()
    assert engine.scheduler.rows.stop.shape[1] == len(many)
    while "b" not in engine.ends:
        engine.step()
    assert engine.scheduler.rows.stop.shape[1] <= 8
    engine.run()
    assert (engine.reason("a"), engine.tokens["a"]) == ("stop", whole[: whole.index(whole[8]) + 1])


def test_steady_decode_sends_no_tokens_and_asks_only_for_the_features_in_use() -> None:
    engine = Harness()
    engine.add("greedy", prompt(5), 9)
    engine.add("random", prompt(5, 9), 4, params=SamplingParams(temperature=0.5, top_k=3))
    engine.step()
    assert (engine.last_plan.features.random, engine.last_plan.features.truncated) == (True, True)
    engine.step()
    assert len(engine.last_plan.tokens) == 0
    assert engine.last_plan.new_rows is None
    for _ in range(3):
        engine.step()
    assert (engine.last_plan.features.random, engine.last_plan.features.truncated) == (False, False)


def test_sampling_settings_travel_with_the_new_row() -> None:
    engine = Harness()
    engine.add("a", prompt(3), params=SamplingParams(temperature=0.5, top_k=-1, top_p=0.25))
    engine.add("b", prompt(3), params=GREEDY)
    engine.add("c", prompt(3), params=SamplingParams(temperature=1e-6, top_k=7))
    engine.step()
    new = engine.last_plan.new_rows
    assert new is not None
    assert new.settings["temperature"].tolist() == [0.5, 0.0, 0.0]
    assert new.settings["top_k"].tolist() == [0, 0, 7]
    assert new.settings["top_p"].tolist() == [0.25, 1.0, 1.0]


def test_every_group_gets_its_own_blocks() -> None:
    engine = Harness(groups=[CacheGroup(SPEC, 1), CacheGroup(MLAKV(8, 4, "float32"), 2)])
    engine.add("a", prompt(9), 6)
    engine.step()
    assert [len(group.blocks) for group in engine.last_plan.new_blocks] == [3, 3]
    engine.run()
    assert engine.tokens["a"] == undisturbed(engine.requests["a"])


def test_a_prompt_behind_a_window_needs_only_the_windows_blocks_and_finds_them_again() -> None:
    groups = [CacheGroup(ToyKV(1, 8, "float32"), 1), CacheGroup(ToyKV(1, 8, "float32", 6), 1)]
    engine = Harness(block_size=4, groups=groups, num_blocks=40, max_model_len=64, max_num_batched_tokens=8)
    request = engine.add("a", prompt(40), 10)
    for _ in range(6):
        engine.step()
    full, window = request.blocks
    assert (len(full), len(window)) == (11, 11)
    # Before the last growth 40 tokens were computed: position 40 sees those from 35 on.
    assert all(full)
    assert [c for c, block in enumerate(window) if block] == [8, 9, 10]
    engine.run()
    # Blocks went back under their names; of the window group, the last ones of any prefix are enough.
    for length, hits in ((45, 44), (23, 20), (9, 8)):
        again = engine.add(f"again {length}", request.tokens(0, length).tolist(), 2)
        engine.step()
        assert again.num_cached_tokens == hits
        assert sum(map(bool, again.blocks[1][: hits // 4])) == min(2, hits // 4)
        engine.run()
        assert engine.tokens[f"again {length}"] == undisturbed(again)


def test_a_state_is_kept_at_the_end_of_a_prompt_and_of_every_nth_block() -> None:
    groups = [CacheGroup(SPEC, 1), CacheGroup(ToyState(every=4), 1)]
    engine = Harness(block_size=4, groups=groups, num_blocks=60, max_model_len=64)
    first = engine.add("a", prompt(23), 30)
    # The step ends at the prompt's last block boundary, and what it left is a name before the next one writes.
    engine.step()
    assert engine.lens() == {0: 20}
    engine.run()
    tokens = first.tokens(0, first.num_tokens).tolist()
    states = engine.cache.pool_of(1)
    named = [n for n in range(1, 14) if states.has(first.block_hashes[n - 1])]
    assert named == [5, 8, 12]
    # Keys and values are there for 52 tokens: the longest that both can resume from counts.
    for length, hits in ((53, 48), (47, 32), (31, 20), (20, 0)):
        again = engine.add(f"again {length}", tokens[:length], 1)
        engine.run()
        assert again.num_cached_tokens == hits
        assert engine.tokens[f"again {length}"] == undisturbed(again)


def test_a_row_advances_by_the_guesses_that_were_right() -> None:
    engine = Harness(drafts=2, max_num_batched_tokens=12)
    requests = [engine.add(name, [n, 5, 8], 20) for n, name in enumerate("abcd")]
    engine.step()
    assert engine.last_plan.drafts is None, "a prompt's last token comes from the host"
    counts = set()
    for _ in range(4):
        before = [request.num_tokens for request in requests]
        engine.step()
        assert engine.last_plan.query_lens.tolist() == [3] * 4
        assert engine.last_plan.drafts.tolist() == [2] * 4
        rows = engine.scheduler.rows
        for request, n in zip(requests, before):
            counts.add(request.num_tokens - n)
            assert rows.known[request.row] == rows.collected[request.row] == request.num_tokens
            assert rows.computed[request.row] == request.num_tokens - 1
    assert counts == {1, 2, 3}
    engine.run()
    for request in requests:
        assert engine.tokens[request.request_id] == undisturbed(request)


def test_no_row_waits_for_the_guesses_of_another() -> None:
    engine = Harness(drafts=2, max_num_batched_tokens=5)
    for n in range(4):
        engine.add(str(n), [n], 9)
    for _ in range(3):
        engine.step()
    assert engine.lens() == {0: 1, 1: 1, 2: 1, 3: 1}
    engine.run()


class AnyToken:
    changes = True

    def bits(self, output_token_ids: Sequence[int]) -> np.ndarray:
        return np.full(-(-VOCAB // 32), -1, np.int32)


def test_masks_and_log_probabilities_take_one_token_a_step() -> None:
    for options in ({}, {"mask": AnyToken()}, {"params": SamplingParams(temperature=0, logprobs=2)}):
        engine = Harness(drafts=2)
        engine.add("a", prompt(4), 9, **options)
        engine.run()
        assert any(plan.drafts is not None for plan in engine.plans) == (not options)


def test_reset_prefix_cache_makes_the_next_request_compute_everything() -> None:
    engine = Harness()
    engine.add("a", prompt(20), 3)
    engine.step()
    engine.core.reset_prefix_cache()
    engine.run()
    engine.core.reset_prefix_cache()
    engine.add("b", prompt(20), 3)
    engine.run()
    assert engine.ends["b"].num_cached_tokens == 0


def test_without_chunked_prefill_the_longest_prompt_has_room_beside_rows_that_decode() -> None:
    args = EngineArgs(enable_chunked_prefill=False, max_model_len=4096, max_num_seqs=16)
    scheduler = args.resolve(CheckpointInfo(8192, "float32"), DeviceInfo("cpu", True, 1 << 40)).scheduler
    assert scheduler.max_num_batched_tokens == 4096 + 16
    assert scheduler.max_num_seqs == 16


@pytest.mark.parametrize(
    ("rows", "tokens", "wanted"), [(33, 32, 32), (32, 32, None), (31, 32, None), (None, 8, 8), (None, None, None)]
)
def test_there_are_no_more_rows_than_tokens_in_a_step(rows: int | None, tokens: int | None, wanted: int | None) -> None:
    """A row without a share of the budget would wait until an earlier one ends; what was changed is said."""
    args = EngineArgs(max_num_seqs=rows, max_num_batched_tokens=tokens)
    config = args.resolve(CheckpointInfo(8192, "float32"), DeviceInfo("cpu", True, 1 << 40))
    asked = rows or 64
    note = f"max_num_seqs lowered from {asked} to max_num_batched_tokens={tokens}"
    assert config.scheduler.max_num_seqs == (wanted or asked)
    assert config.scheduler.max_num_batched_tokens == (tokens or 512)
    assert config.notes == ((note,) if wanted else ())
