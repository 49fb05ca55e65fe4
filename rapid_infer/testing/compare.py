"""An engine against the oracle: the same tokens, and the same logits behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rapid_infer.params import SamplingParams
from rapid_infer.testing.oracle import GreedyRun

if TYPE_CHECKING:
    import torch

    from rapid_infer.llm import LLM

FP32_TOLERANCE = 1e-4


@contextmanager
def record_logits(llm: LLM) -> Iterator[list[torch.Tensor]]:
    """Within the context, collect the logits of every step: fp32 `[rows that got a token, vocab]`, in launch order.

    With one request at a time that is one row for each new token.
    """
    runner: Any = llm.engine.executor.runner
    head = runner.model.head
    recorded: list[torch.Tensor] = []
    original = head.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        scores = original(hidden)
        recorded.append(scores.detach().clone())
        return scores

    def argmax(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The head's own may never compute the scores of all tokens.
        value, index = logits(hidden).max(dim=-1)
        return value, index + head.layout.outs[0].start

    head.logits, head.argmax = logits, argmax
    try:
        yield recorded
    finally:
        del head.logits, head.argmax


def assert_exact(llm: LLM, runs: Sequence[GreedyRun], tolerance: float = FP32_TOLERANCE) -> None:
    """Each prompt alone gives the oracle's tokens, by logits within `tolerance`.

    For fp32, with runs of `Oracle.clear_runs`. AssertionError with the first difference. Prints the largest one of
    the logits.
    """
    largest: list[float] = []
    for run in runs:
        with record_logits(llm) as recorded:
            output = llm.generate([run.prompt], _greedy(len(run.tokens)))[0].outputs[0]
        what = f"prompt of {len(run.prompt)} tokens"
        assert output.error is None, f"{what}: {output.error}"
        # With two steps in flight one more may have been launched than tokens were wanted.
        logits = _stack(recorded)[: len(run.tokens)]
        difference = float((logits[0] - run.logits[0]).abs().max())
        assert difference <= tolerance, (
            f"{what}: the first logits differ by {difference:.2e}, more than {tolerance:.0e}"
        )
        assert output.token_ids == run.tokens, f"{what}: tokens {output.token_ids}, transformers gives {run.tokens}"
        largest.append(float((logits - run.logits).abs().max()))
    worst = _worst(largest, tolerance)
    print(f"logits of {len(runs)} runs within {worst:.2e}")


def forced_logits(llm: LLM, run: GreedyRun) -> torch.Tensor:
    """The engine's logits `[len(run.tokens), vocab]` at the places of `run.logits`, whatever it would choose itself."""
    with record_logits(llm) as recorded:
        for length in range(len(run.tokens)):
            llm.generate([run.prompt + run.tokens[:length]], _greedy(1))
    return _stack(recorded)


def assert_close(llm: LLM, runs: Sequence[GreedyRun], tolerance: float) -> None:
    """Logits within `tolerance`, and the same best token where the gap exceeds twice that: both of two logits may move.

    For bf16 and fp16, where rounding decides close calls. The oracle should run in the engine's dtype. AssertionError
    with the largest difference. Prints it.
    """
    largest, decided, total = [], 0, 0
    for run in runs:
        logits = forced_logits(llm, run)
        largest.append(float((logits - run.logits).abs().max()))
        clear = run.gaps > 2 * tolerance
        assert logits.argmax(-1)[clear].equal(run.logits.argmax(-1)[clear]), "another token than transformers is best"
        decided, total = decided + int(clear.sum()), total + len(clear)
    worst = _worst(largest, tolerance)
    print(
        f"logits of {len(runs)} runs within {worst:.2e}; {decided} of {total} tokens have a gap above {2 * tolerance:g}"
    )


def _worst(differences: Sequence[float], tolerance: float) -> float:
    # Not max(...) <= tolerance: max() passes over a NaN, which is the worst of all.
    bad = [d for d in differences if not d <= tolerance]
    assert not bad, f"logits differ by {bad[0]:.2e}, more than {tolerance:.0e}"
    return max(differences)


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _stack(steps: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(list(steps)).cpu()
