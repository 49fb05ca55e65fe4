"""Rings between processes, and sums in the order of the ranks: with threads over the same memory."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import torch
from dataclasses import replace
from types import SimpleNamespace

from rapid_infer.engine.row_fields import SamplingFeatures, neutral_settings
from rapid_infer.engine.step_plan import LogprobArrays, NewBlocks, NewRows, RowMasks, StepPlan, StepResult
from rapid_infer.executors import rank_messages as messages
from rapid_infer.executors.multi_process import MultiProcessExecutor
from rapid_infer.executors.rank_messages import Sample, Step
from rapid_infer.parallel import shm
from rapid_infer.parallel.bus import BusError, Ring, SharedMemory, wait_until
from rapid_infer.parallel.shm import ShmComm


def make_ring(capacity: int, readers: int) -> Ring:
    wake = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(readers)]
    return Ring(SharedMemory(Ring.size(capacity, readers)), capacity, readers, wake)


def test_every_reader_gets_every_message_in_order_round_the_end_of_the_ring() -> None:
    ring = make_ring(1024, 3)
    sizes = np.random.default_rng(0).integers(0, 400, 500).tolist()
    sent = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    got: list[list[bytes]] = [[], [], []]

    def read(reader: int) -> None:
        while len(got[reader]) < len(sent):
            wait_until(lambda: ring.has_message(reader), lambda s: ring.block(reader, s), lambda: None)
            payload = ring.read(reader)
            assert payload is not None
            got[reader].append(payload)
            if reader == 1 and len(got[1]) % 100 == 0:
                time.sleep(0.02)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(3)]
    for thread in threads:
        thread.start()
    for payload in sent:
        ring.write(payload, lambda: None)
    for thread in threads:
        thread.join(30)
    assert got == [sent] * 3


def test_a_reader_that_sleeps_is_woken_and_a_writer_that_waits_can_be_ended() -> None:
    ring = make_ring(256, 1)
    threading.Timer(0.1, ring.write, (b"late", lambda: None)).start()
    started = time.monotonic()
    wait_until(lambda: ring.has_message(0), lambda s: ring.block(0, 30), lambda: None)
    assert time.monotonic() - started < 5
    assert ring.read(0) == b"late"
    assert ring.read(0) is None
    with pytest.raises(BusError, match="129 bytes is larger than the bus takes: 128"):
        ring.write(bytes(129), lambda: None)

    def give_up() -> None:
        raise InterruptedError("its reader is gone")

    with pytest.raises(InterruptedError):
        for _ in range(4):
            ring.write(bytes(100), give_up)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_sums_are_those_of_fp32_in_the_order_of_the_ranks(
    ranks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that some tensors take several rounds.
    monkeypatch.setattr(shm, "SLOT_BYTES", 256)
    memory = SharedMemory(ShmComm.bytes_needed(ranks))
    generator = torch.Generator().manual_seed(ranks)
    given = [
        [(torch.randn(rows, 31, generator=generator) * 100).to(dtype) for rows in (1, 2, 7, 3)] for _ in range(ranks)
    ]
    given[0][1][0, :3] = torch.tensor([0.0, -0.0, float("inf")]).nan_to_num().to(dtype)
    results: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(ranks)]

    def run(rank: int) -> None:
        comm = ShmComm(SharedMemory(ShmComm.bytes_needed(ranks), os.dup(memory.fd)), rank, ranks)
        for x in given[rank] * 5:
            results[rank].append((comm.all_reduce(x), comm.all_gather(x)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(4 * 5):
        every = [given[rank][number % 4] for rank in range(ranks)]
        total = every[0].float()
        for one in every[1:]:
            total = total + one
        for rank in range(ranks):
            added, gathered = results[rank][number]
            assert torch.equal(added, total.to(dtype))
            assert torch.equal(gathered, torch.stack(every))


def arrays(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def test_plans_and_results_arrive_as_they_were_sent() -> None:
    settings = neutral_settings(2)
    settings["seed"], settings["top_p"] = [-(2**62), 3], 0.25
    plan = StepPlan(
        7, arrays(3), arrays(3), arrays(0), arrays(2), NewRows(arrays(2), arrays(2), settings),
        (NewBlocks(arrays(2), arrays(2), arrays(2)),), SamplingFeatures(random=True, masks=True, logprobs=3), 4, 9, 5,
        masks=RowMasks(arrays(2), arrays(6).reshape(2, 3)),
    )  # fmt: skip
    sent = messages.to_rank(messages.encode(Step(7, 9, messages.encode_plan(plan), gated=True)))
    assert isinstance(sent, Step)
    assert (sent.step, sent.max_seq_len, sent.gated) == (7, 9, True)
    assert sent.plan is not None
    got = messages.to_plan(sent.plan)
    assert got.features == plan.features
    assert got.features.processed
    assert got.new_rows is not None
    assert (got.new_rows.settings == settings).all()
    assert got.masks is not None
    assert got.masks.bits.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (got.step, got.max_seq_len, got.prompt_logprobs) == (0, 0, None)
    assert messages.to_rank(messages.encode(Sample(None))) == Sample(None)
    scores = LogprobArrays(arrays(6).reshape(2, 3), np.full((2, 3), -0.5, np.float32), arrays(2))
    result = StepResult(arrays(2)[:, None], np.array([True, False]), scores)
    back = messages.to_result(messages.encode(result))
    assert back.token_ids.tolist() == [[0], [1]]
    assert back.failed.tolist() == [True, False]
    assert back.logprobs is not None
    assert (back.logprobs.values == scores.values).all()


def test_a_step_like_the_one_before_is_sent_as_its_number() -> None:
    executor, sent = object.__new__(MultiProcessExecutor), []
    executor._last_plan, executor.group = b"", SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    plan = StepPlan(
        7, arrays(256), np.ones(256, np.int32), arrays(0), arrays(256), None,
        (NewBlocks(arrays(0), arrays(0), arrays(0)),), SamplingFeatures(), 1, 90, 256,
    )  # fmt: skip
    more = replace(plan, step=10, new_blocks=(NewBlocks(arrays(1), arrays(1), arrays(1)),))
    for one in (plan, replace(plan, step=8, max_seq_len=91), replace(plan, step=9, max_seq_len=92), more, more):
        executor.launch(one)
    assert [message.plan is None for message in sent] == [False, True, True, False, True]
    assert [(message.step, message.max_seq_len) for message in sent[:3]] == [(7, 90), (8, 91), (9, 92)]
    assert len(messages.encode(sent[1])) < 64 < len(messages.encode(sent[0]))
