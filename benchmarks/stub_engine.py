"""An engine process without a model, to measure or test what stands before it: speaks as the real one, knows no torch.

It answers a prompt with the text of its last user message, or for ever with a word where that is empty or the prompt is
no chat. $STUB_STEP: seconds of a step (0: as fast as it can); $STUB_ROWS: requests that run at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from rapid_infer.engine.request import Request
from rapid_infer.engine.results import Finished, StepOutputs
from rapid_infer.engine.scheduler import SchedulerStats
from rapid_infer.frontend import EngineInfo
from rapid_infer.ipc.engine_process import main
from rapid_infer.ipc.fronts import Fronts
from rapid_infer.ipc.messages import Ready, Start
from rapid_infer.outputs import FinishReason

VOCAB = 1024
MAX_LEN = 262144
FAULT = 1
"""A prompt that begins with this token ends in an error."""

ROWS = int(os.environ.get("STUB_ROWS", "256"))
STEP = float(os.environ.get("STUB_STEP", "0"))


@dataclass
class _Row:
    """`answer`: what it is to say, then its end; None: a word for ever."""

    limit: int
    answer: list[int] | None
    stops: tuple[int, ...]
    made: int = 0

    def next(self) -> int:
        token = 300 + self.made % 600 if self.answer is None else self.answer[self.made]
        self.made += 1
        return token


class StubCore:
    """What `EngineServer` asks of an `EngineCore`."""

    def __init__(self, tokenizer_dir: str) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(f"{tokenizer_dir}/tokenizer.json")
        self.user = tokenizer.encode("<|im_start|>user\n", add_special_tokens=False).ids
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.waiting: dict[str, _Row] = {}
        self.rows: dict[str, _Row] = {}
        self.ended: list[Finished] = []
        self.executor = SimpleNamespace(late_graphs=lambda: (0, 0.0), on_failure=lambda call: None)
        self.scheduler = SimpleNamespace(running=self.rows, waiting=self.waiting, stats=SchedulerStats())

    @property
    def cache(self) -> Any:
        return SimpleNamespace(num_free=1000 - len(self.rows), num_usable=1000)

    def add_request(self, request: Request) -> None:
        prompt = request.prompt_token_ids.tolist()
        if prompt[0] == FAULT:
            self.ended.append(Finished(request.request_id, FinishReason.ERROR, "the stub was asked to fail", 0))
            return
        row = _Row(request.limit - len(prompt), self._answer(prompt), request.stop_token_ids)
        self.waiting[request.request_id] = row

    def _answer(self, prompt: list[int]) -> list[int] | None:
        width = len(self.user)
        for at in range(len(prompt) - width, -1, -1):
            if prompt[at : at + width] == self.user:
                said = prompt[at + width : prompt.index(self.end, at)]
                return [*said, self.end] if said else None
        return None

    def abort(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            if self.rows.pop(name, None) or self.waiting.pop(name, None):
                self.ended.append(Finished(name, FinishReason.ABORT, None, 0))

    def has_unfinished_requests(self) -> bool:
        return bool(self.rows or self.waiting or self.ended)

    def step(self) -> StepOutputs:
        began = time.perf_counter()
        started = list(self.waiting)[: ROWS - len(self.rows)]
        for name in started:
            self.rows[name] = self.waiting.pop(name)
        names, tokens = list(self.rows), [row.next() for row in self.rows.values()]
        ended, self.ended = self.ended, []
        for name, token in zip(names, tokens):
            row = self.rows[name]
            stopped = token in row.stops
            if stopped or row.made >= row.limit or (row.answer is not None and row.made == len(row.answer)):
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                ended.append(Finished(name, reason, None, 0))
                del self.rows[name]
        if names:
            time.sleep(max(0.0, began + STEP - time.perf_counter()))
        return StepOutputs(names, tokens, ended, num_cached_tokens=dict.fromkeys(started, 0))

    def close(self) -> None:
        """Nothing is open."""


def start(fronts: Fronts, message: Start) -> Any:
    core = StubCore(message.path)
    fronts.send(Ready(EngineInfo("Stub", "float32", "cpu", VOCAB, MAX_LEN, (), 0, True, max_num_seqs=ROWS)))
    return core, None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), start))
