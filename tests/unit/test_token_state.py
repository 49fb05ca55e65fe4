"""The per-token tables of the device: what new rows bring, what stays of old ones, and what logits become by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rapid_infer.engine.masks import AllowedTokens
from rapid_infer.engine.plan_builder import PlanBuilder
from rapid_infer.engine.request import Request
from rapid_infer.engine.row_fields import ROW_DTYPE, SamplingFeatures
from rapid_infer.engine.row_state import RowState
from rapid_infer.engine.step_plan import RowMasks, RowTokens, StepPlan, TokenLists
from rapid_infer.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from rapid_infer.worker.device_rows import DeviceRows
from rapid_infer.worker.logprobs import gather_logprobs
from rapid_infer.worker.row_settings import RowSettings
from rapid_infer.worker.sample import sample_logits
from rapid_infer.worker.staging import Staging
from rapid_infer.worker.token_state import TokenState

ROWS, VOCAB = 4, 37
INF = math.inf
PROMPT = (3, 3, 9)
_DTYPES = {np.int32: torch.int32, np.float32: torch.float32}


class Device:
    """Device rows fed as the engine feeds it: by plans, through the staging buffer."""

    def __init__(self, vocab: int = VOCAB) -> None:
        cpu = torch.device("cpu")
        self.device_rows = DeviceRows(cpu, ROWS, 1, 4, vocab)
        self.rows = RowState(ROWS, 64)
        self._staging = Staging(cpu, slots=2)

    def start(self, *requests: Request) -> StepPlan:
        """A step in which these requests get the lowest free rows."""
        builder = PlanBuilder(1)
        taken = np.array([self.rows.assign_row(request, 0, 64, 0) for request in requests], np.int64)
        for row, request in zip(taken.tolist(), requests):
            builder.add_row(row, 0, request)
        lengths = np.array([request.num_tokens for request in requests], np.int64)
        none = np.zeros_like(lengths)
        plan = builder.build(1, self.rows, taken, none, lengths, np.arange(len(taken)), none)
        self.device_rows.apply_plan(plan, iter(self._staging.copy_to_device(DeviceRows.pack_plan(plan))))
        return plan

    def process(self, logits: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> Tensor:
        at = torch.tensor(rows)
        features = self.rows.features(np.array(rows))
        before = logits.clone()
        after = self.device_rows.tokens.process_logits(
            logits, at, torch.tensor(lengths), self.device_rows.sampling.gather_rows(at), features
        )
        assert torch.equal(logits, before), "the logits as the model gave them are still needed"
        return after


def request(
    output: Sequence[int] = (), stop: tuple[int, ...] = (), prompt: Sequence[int] = PROMPT, **params: Any
) -> Request:
    settings = SamplingParams(**{"temperature": 0, "max_tokens": None, **params})
    made = Request("r", np.array(prompt, np.int32), settings, stop, 60)
    made.output_token_ids.extend(output)
    if settings.allowed_token_ids is not None:
        made.mask = AllowedTokens(settings.allowed_token_ids, VOCAB)
    return made


def changed(logits: Tensor, values: Mapping[int, float]) -> Tensor:
    logits = logits.clone()
    for token, value in values.items():
        logits[token] = value
    return logits


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def logits() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, VOCAB)


def test_the_wide_tables_exist_once_a_request_needs_them(device: Device) -> None:
    tokens = device.device_rows.tokens
    device.start(request(logit_bias={1: 2.0}, min_tokens=2))
    assert tokens.in_prompt is tokens.output_counts is tokens.mask_bits is None
    device.start(request(presence_penalty=1.0))
    assert tokens.in_prompt is not None
    assert tokens.output_counts is not None
    assert (tokens.in_prompt.shape, tokens.output_counts.shape) == ((ROWS + 1, VOCAB),) * 2
    assert tokens.mask_bits is None
    device.start(request(allowed_token_ids=[1]))
    assert tokens.mask_bits is not None
    assert tokens.mask_bits.shape == (ROWS + 1, 2)


def test_counts_are_those_of_the_prompt_and_of_the_output_so_far(device: Device) -> None:
    device.start(request(output=[5, 5, 3], repetition_penalty=2.0), request(output=[7]))
    tokens = device.device_rows.tokens
    assert tokens.in_prompt is not None
    assert tokens.output_counts is not None
    assert torch.nonzero(tokens.in_prompt).tolist() == [[0, 3], [0, 9]]
    assert {(r, t): int(tokens.output_counts[r, t]) for r, t in torch.nonzero(tokens.output_counts).tolist()} == {
        (0, 5): 2,
        (0, 3): 1,
    }
    tokens.count_tokens(torch.tensor([0, 1]), torch.tensor([5, 5]))
    assert tokens.output_counts[:, 5].tolist() == [3, 1, 0, 0, 0]


@pytest.mark.parametrize("sign", [1, -1])
def test_penalties(device: Device, logits: Tensor, sign: int) -> None:
    logits = sign * logits.abs()
    settings = {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    device.start(request(output=[5, 5, 3], **settings), request(output=[1]))
    first, second = device.process(logits[:2], [0, 1], [6, 4])
    row = logits[0]
    rescaled = {t: row[t] / 1.7 if sign > 0 else row[t] * 1.7 for t in (3, 5, 9)}
    wanted = {3: rescaled[3] - 0.5 - 0.25, 5: rescaled[5] - 0.5 - 0.5, 9: rescaled[9]}
    torch.testing.assert_close(first, changed(row, {t: float(v) for t, v in wanted.items()}))
    assert torch.equal(second, logits[1])


def test_bias_and_masks_and_minimum_length_touch_their_own_rows_only(device: Device, logits: Tensor) -> None:
    device.start(
        request(logit_bias={0: -100.0, 36: 5.0}),
        request(allowed_token_ids=[0, 31, 32, 36]),
        request(stop=(0, 8), min_tokens=2),
        request(),
    )
    biased, masked, early, plain = device.process(logits, [0, 1, 2, 3], [3, 3, 4, 3])
    assert torch.equal(biased, changed(logits[0], {0: logits[0, 0] - 100, 36: logits[0, 36] + 5}))  # type: ignore[dict-item]
    assert torch.nonzero(masked > -INF).flatten().tolist() == [0, 31, 32, 36]
    assert torch.equal(masked[masked > -INF], logits[1, [0, 31, 32, 36]])
    assert torch.equal(early, changed(logits[2], {0: -INF, 8: -INF}))
    assert torch.equal(plain, logits[3])
    [late] = device.process(logits[2:3], [2], [5])
    assert torch.equal(late, logits[2])


def test_rows_in_any_order(device: Device, logits: Tensor) -> None:
    device.start(request(logit_bias={1: 9.0}), request(), request(allowed_token_ids=[4]), request(output=[2] * 3))
    straight = device.process(logits, [0, 1, 2, 3], [3] * 4)
    swapped = device.process(logits[[2, 0]], [2, 0], [3, 3])
    assert torch.equal(swapped, straight[[2, 0]])


def test_lists_of_any_length_up_to_the_longest_have_their_place() -> None:
    vocab = MAX_LOGIT_BIAS + 10
    device = Device(vocab)
    logits = torch.randn(2, vocab)
    tokens = device.device_rows.tokens
    tables = tokens.stop_ids, tokens.bias_ids, tokens.bias_values
    device.start(request(logit_bias={4: 1.0}, stop=(6,), min_tokens=9))
    stop = tuple(range(10, 10 + MAX_STOP_TOKEN_IDS))
    device.start(request(logit_bias={t: 2.0 for t in range(10, vocab)}, stop=stop, min_tokens=9))
    first, second = device.process(logits, [0, 1], [3, 3])
    assert torch.equal(first, changed(logits[0], {4: logits[0, 4] + 1, 6: -INF}))  # type: ignore[dict-item]
    wanted = logits[1].clone()
    wanted[10:] += 2
    wanted[list(stop)] = -INF
    assert torch.equal(second, wanted)
    assert all(a is b for a, b in zip(tables, (tokens.stop_ids, tokens.bias_ids, tokens.bias_values)))


def test_the_signature_says_which_of_the_wide_tables_exist(device: Device) -> None:
    tokens = device.device_rows.tokens
    device.start(request(logit_bias={t: 2.0 for t in range(5)}, stop=(1, 2, 3), min_tokens=9))
    assert tokens.signature == (False, False)
    device.start(request(presence_penalty=1.0))
    assert tokens.signature == (True, False)
    device.start(request(allowed_token_ids=[1]))
    assert tokens.signature == (True, True)


def test_a_table_that_does_not_exist_has_nothing_to_say(device: Device, logits: Tensor) -> None:
    all_on = SamplingFeatures(penalties=True, bias=True, min_tokens=True, masks=True)
    at, tokens = torch.arange(ROWS), device.device_rows.tokens
    after = tokens.process_logits(
        logits, at, torch.full((ROWS,), 3), device.device_rows.sampling.gather_rows(at), all_on
    )
    assert torch.equal(after, logits)
    tokens.count_tokens(at, at)
    assert tokens.signature == (False, False)


def test_a_padding_row_may_be_counted_often(device: Device) -> None:
    device.start(request(presence_penalty=1.0))
    tokens = device.device_rows.tokens
    tokens.count_tokens(torch.tensor([ROWS, 0, ROWS, ROWS]), torch.tensor([0, 5, 0, 0]))
    assert tokens.output_counts is not None
    assert torch.nonzero(tokens.output_counts[:ROWS]).tolist() == [[0, 5]]


def test_packed_settings_are_those_of_the_single_fields(device: Device) -> None:
    plan = device.start(request(temperature=0.3, top_k=7, seed=-(2**40)), request(top_p=0.5, min_p=0.25, min_tokens=2))
    assert plan.new_rows is not None
    packed = RowSettings.neutral(ROWS + 1, torch.device("cpu"))
    packed.write_rows(torch.tensor([0, 1]), torch.from_numpy(RowSettings.pack_rows(plan.new_rows)))
    for name in ROW_DTYPE.names or ():
        got = getattr(packed, name)
        assert torch.equal(got, getattr(device.device_rows.sampling, name)), name
        assert got[:2].tolist() == plan.new_rows.settings[name].tolist()


def test_nothing_waits_for_the_device() -> None:
    """Fake tensors have no values: whatever asked for one, or for a size that depends on one, would raise."""
    ids = np.array([0, 1, 2], np.int32)
    some = RowTokens(ids, ids, ids)
    lists = TokenLists(stop=some, bias=some, bias_values=ids.astype(np.float32), prompt=some, output=some)
    masks = RowMasks(ids[:2], np.zeros((2, 2), np.int32))
    on = SamplingFeatures(
        random=True, truncated=True, min_p=True, penalties=True, bias=True, min_tokens=True, masks=True
    )
    with FakeTensorMode():
        tokens, state = TokenState(ROWS, VOCAB, torch.device("cpu")), RowSettings.neutral(ROWS, torch.device("cpu"))
        staged = [
            torch.empty(array.shape, dtype=_DTYPES[array.dtype.type]) for array in TokenState.pack_changes(lists, masks)
        ]
        rows, logits = torch.zeros(3, dtype=torch.int64), torch.zeros(3, VOCAB)
        tokens.clear_rows(rows)
        tokens.apply_changes(lists, masks, iter(staged))
        state.write_rows(rows, torch.zeros(3 * state.words.shape[1], dtype=torch.int32))
        state = state.gather_rows(rows)
        for features in (on, SamplingFeatures(random=True), SamplingFeatures()):
            chosen, failed = sample_logits(
                tokens.process_logits(logits, rows, rows, state, features), state, rows, features
            )
            tokens.count_tokens(rows, chosen)
            assert failed.shape == gather_logprobs(logits, chosen, 5).rank.shape == (3,)


def test_a_row_begins_without_what_its_last_owner_left(device: Device, logits: Tensor) -> None:
    everything = {"repetition_penalty": 1.5, "logit_bias": {1: 9.0, 2: -9.0}, "allowed_token_ids": [1, 2, 8]}
    first = request(output=[1, 1], stop=(8, 1), min_tokens=30, **everything)
    device.start(first, request(presence_penalty=2.0, frequency_penalty=2.0, output=[4, 4]))
    device.rows.free_row(0)
    device.start(request())
    all_on = SamplingFeatures(penalties=True, bias=True, min_tokens=True, masks=True)
    at = torch.tensor([0, 1])
    after = device.device_rows.tokens.process_logits(
        logits[:2], at, torch.tensor([3, 3]), device.device_rows.sampling.gather_rows(at), all_on
    )
    assert torch.equal(after[0], logits[0])
    assert torch.equal(after[1], changed(logits[1], {4: logits[1, 4] - 2 - 4}))  # type: ignore[dict-item]
    device.rows.free_row(0)
    device.start(request(repetition_penalty=1.0, presence_penalty=1.0, output=[6]))
    [again] = device.process(logits[:1], [0], [4])
    assert torch.equal(again, changed(logits[0], {6: logits[0, 6] - 1}))  # type: ignore[dict-item]


def test_a_mask_that_leaves_only_stop_tokens_wins_over_the_minimum_length(device: Device, logits: Tensor) -> None:
    device.start(
        request(allowed_token_ids=[8, 9], stop=(8, 9), min_tokens=5),
        request(allowed_token_ids=[8, 10], stop=(8, 9), min_tokens=5),
    )
    only, some = device.process(logits[:2], [0, 1], [3, 3])
    assert torch.nonzero(only > -INF).flatten().tolist() == [8, 9]
    assert torch.nonzero(some > -INF).flatten().tolist() == [10]


def test_a_stop_token_outside_the_vocabulary_is_no_token_at_all(device: Device, logits: Tensor) -> None:
    device.start(request(stop=(VOCAB, 2**31 - 1, 5), min_tokens=5))
    [early] = device.process(logits[:1], [0], [3])
    assert torch.equal(early, changed(logits[0], {5: -INF}))


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {t: -100.0 for t in range(VOCAB)}, "repetition_penalty": 1e300},
        {"allowed_token_ids": [5], "min_tokens": 2**40, "max_tokens": None, "repetition_penalty": 5.0},
    ],
    ids=str,
)
def test_minus_infinity_stays_and_some_token_always_remains(device: Device, settings: dict[str, Any]) -> None:
    logits = torch.linspace(-50, 50, VOCAB)[None].clone()
    logits[0, [0, 18]] = torch.tensor([-INF, 0.0])
    device.start(request(output=list(range(VOCAB)), prompt=range(VOCAB), stop=(5,), **settings))
    [after] = device.process(logits, [0], [2 * VOCAB])
    assert not after.isnan().any()
    assert after[0] == -INF
    assert after.max() > -INF
    assert (after / 1e-5).max() < INF


def test_extreme_settings_stay_within_what_the_device_s_numbers_hold(device: Device) -> None:
    settings = SamplingParams(temperature=1e300, top_k=2**40, max_tokens=None, min_tokens=2**40, top_p=1e-300)
    device.start(Request("r", np.array([1], np.int32), settings, (5,), 60))
    state = device.device_rows.sampling.gather_rows(torch.tensor([0]))
    assert state.temperature.isfinite().all()
    assert (int(state.top_k), int(state.min_length)) == (2**31 - 1, 60)
    assert (torch.tensor([-INF]) / state.temperature).tolist() == [-INF]
