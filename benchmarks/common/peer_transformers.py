"""transformers' `generate` on the same requests: a static batch, greedy, the same number of tokens."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.metrics import gaps
from common.runner import Run
from common.schema import RequestSample, RunSample
from common.workloads import Request


class TransformersPeer:
    """Loads the model of a directory (random weights if `dummy`) with transformers' own defaults."""

    def __init__(self, path: Path, *, dtype: str, device: str, dummy: bool, seed: int = 0) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        wanted = getattr(torch, dtype)
        if dummy:
            torch.manual_seed(seed)
            with torch.device(device):
                config = AutoConfig.from_pretrained(path, trust_remote_code=False)
                model: Any = AutoModelForCausalLM.from_config(config, dtype=wanted, trust_remote_code=False)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, trust_remote_code=False)
        self.model: Any = model.to(device).eval()
        self.device = torch.device(device)
        # No stop token at all: `min_new_tokens` would give the same number of tokens, but cost a mask at every step.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def run(self, requests: Sequence[Request], batch_size: int | None = None) -> Run:
        """All requests, `batch_size` at a time (all together by default), in their order.

        A batch runs to its longest answer, as static batching does; tokens beyond what a request asked are not counted.
        """
        size = batch_size or len(requests)
        samples: list[RequestSample] = []
        tokens: list[list[int]] = []
        gc.collect()
        origin = time.perf_counter()
        for i in range(0, len(requests), size):
            batch = requests[i : i + size]
            rows, times = self._generate(batch)
            for (prompt, wanted), row in zip(batch, rows):
                seen = [t - origin for t in times[:wanted]]
                error = None if len(row) == len(seen) == wanted else f"{len(row)} tokens, expected {wanted}"
                itl = gaps([(t, 1) for t in seen])
                samples.append(RequestSample(len(prompt), len(row), 0.0, seen[-1], seen[0], 0, itl, error))
                tokens.append(row)
        return Run(RunSample(time.perf_counter() - origin, samples), tokens)

    def _generate(self, batch: Sequence[Request]) -> tuple[list[list[int]], list[float]]:
        """Tokens of each row, and the time of each step."""
        longest = max(len(prompt) for prompt, _ in batch)
        steps = max(wanted for _, wanted in batch)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in batch], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch], device=self.device)
        times: list[float] = []

        def note(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            # `generate` reads a flag from the device right after this, so waiting here costs nothing more.
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=steps,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                stopping_criteria=_criteria(note),
            )
        rows = out[:, longest:].tolist()
        return [row[:wanted] for row, (_, wanted) in zip(rows, batch)], times


def _criteria(note: Any) -> Any:
    from transformers import StoppingCriteriaList

    return StoppingCriteriaList([note])


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of the tokens before the first difference of each request."""
    same = total = 0
    for a, b in zip(ours, theirs):
        total += len(a)
        same += next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return same / total if total else 0.0
