"""transformers as the oracle: greedy tokens, the logits behind them, and how close each choice was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MIN_GAP = 2e-3
"""Below this gap between the two best logits, rounding in fp32 may decide which one is best."""


@dataclass(frozen=True)
class GreedyRun:
    """What transformers continues `prompt` with. `logits`: fp32 `[len(tokens), vocab]`, those that each token was
    chosen by.
    """

    prompt: list[int]
    tokens: list[int]
    logits: torch.Tensor

    @property
    def gaps(self) -> torch.Tensor:
        """`[len(tokens)]`: how far the best logit stands above the second best."""
        best = self.logits.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]

    @property
    def gap(self) -> float:
        """The smallest of `gaps`."""
        return float(self.gaps.min())


class Oracle:
    """The transformers model in a checkpoint directory, on the CPU, with eager attention and no cache: slow, plain and
    right.
    """

    def __init__(self, path: str | Path, dtype: str = "float32") -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="eager", trust_remote_code=False
        ).eval()
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")

    @property
    def vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size

    def logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """fp32 `[n, length, vocab]` after each token of n sequences of one length."""
        import torch

        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([list(s) for s in sequences]), use_cache=False).logits.float()

    def greedy(self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Iterable[int] = ()) -> list[GreedyRun]:
        """The most likely next token, `max_tokens` times or up to the first of `stop`, which is included."""
        import torch

        stop = frozenset(stop)
        runs: dict[int, GreedyRun] = {}
        by_length: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(i)
        for members in by_length.values():
            # Equal lengths run as one batch: padding would need a mask, and an oracle should need as little as it can.
            sequences = [list(prompts[i]) for i in members]
            steps = []
            for _ in range(max_tokens):
                last = self.logits(sequences)[:, -1]
                steps.append(last)
                for sequence, token in zip(sequences, last.argmax(dim=-1).tolist()):
                    sequence.append(token)
            for row, i in enumerate(members):
                tokens = sequences[row][len(prompts[i]) :]
                length = next((n for n, token in enumerate(tokens, 1) if token in stop), max_tokens)
                logits = torch.stack([step[row] for step in steps[:length]])
                runs[i] = GreedyRun(list(prompts[i]), tokens[:length], logits)
        return [runs[i] for i in range(len(prompts))]

    def prompts(self, lengths: Sequence[int], seed: int = 0, prefix: Sequence[int] = ()) -> list[list[int]]:
        """One random prompt for each length, which counts the common `prefix`."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        fresh = (
            torch.randint(self.vocab_size, (max(length - len(prefix), 0),), generator=generator) for length in lengths
        )
        return [list(prefix)[:length] + tail.tolist() for length, tail in zip(lengths, fresh)]

    def clear_runs(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        prefix: Sequence[int] = (),
        min_gap: float = MIN_GAP,
    ) -> list[GreedyRun]:
        """Runs of random prompts of these lengths with no close call: each choice is clear by `min_gap`, so tokens must
        be exact.

        A prompt with a close call is replaced by another. AssertionError when ten in a row have one, which no tolerance
        explains.
        Prints the smallest gap.
        """
        runs: list[GreedyRun | None] = [None] * len(lengths)
        for attempt in range(10):
            open_ = [i for i, run in enumerate(runs) if run is None]
            if not open_:
                break
            prompts = self.prompts([lengths[i] for i in open_], seed * 1000 + attempt, prefix)
            for i, run in zip(open_, self.greedy(prompts, max_tokens)):
                if run.gap >= min_gap:
                    runs[i] = run
        found = [run for run in runs if run is not None]
        assert len(found) == len(runs), f"{len(runs) - len(found)} prompts have a gap below {min_gap} whatever the seed"
        print(
            f"{len(found)} greedy runs of {max_tokens} tokens, smallest top-1/top-2 gap {min(r.gap for r in found):.2e}"
        )
        return found
