"""How far a model is from transformers: greedy tokens, the first token's logits, and the KL divergence.

python scripts/accuracy_report.py MODEL [--dtype bfloat16] [--oracle-dtype float32] [--lengths 16 64 256] [--json]

Prompts are random token ids, or those of --prompts FILE, one prompt a line. Both sides get the same tokens at every
place, transformers' own greedy ones, so one differing choice does not make all later ones differ. transformers runs on
the CPU without a cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rapid_infer import LLM, hub
from rapid_infer.testing import GreedyRun, Oracle, forced_logits


@dataclass(frozen=True)
class Report:
    """Of `tokens` places after `prompts` prompts. `kl` is transformers' distribution against ours, in nats.

    `differing` holds (prompt, place, transformers' token, ours, transformers' gap between its best two).
    """

    model: str
    dtype: str
    oracle_dtype: str
    prompts: int
    tokens: int
    equal_tokens: int
    first_logit_difference: float
    largest_logit_difference: float
    mean_kl: float
    largest_kl: float
    differing: list[tuple[int, int, int, int, float]]

    def __str__(self) -> str:
        lines = [
            f"{self.model}: {self.dtype} against transformers in {self.oracle_dtype}, {self.prompts} prompts",
            f"greedy tokens: {self.equal_tokens} of {self.tokens} equal ({self.equal_tokens / self.tokens:.2%})",
            f"largest logit difference: {self.first_logit_difference:.3e} of the first token, "
            f"{self.largest_logit_difference:.3e} of any",
            f"KL divergence: {self.mean_kl:.3e} in the mean, {self.largest_kl:.3e} at most",
        ]
        lines += [
            f"prompt {p}, token {i}: transformers {theirs}, ours {ours}, its gap was {gap:.2e}"
            for p, i, theirs, ours, gap in self.differing
        ]
        return "\n".join(lines)


def compare(llm: LLM, runs: Sequence[GreedyRun], model: str, oracle_dtype: str) -> Report:
    first, largest, kl = [], [], []
    differing: list[tuple[int, int, int, int, float]] = []
    for number, run in enumerate(runs):
        logits = forced_logits(llm, run)
        difference = (logits - run.logits).abs().amax(-1)
        first.append(float(difference[0]))
        largest.append(float(difference.max()))
        theirs = run.logits.log_softmax(-1)
        kl.append((theirs.exp() * (theirs - logits.log_softmax(-1))).sum(-1))
        best, gaps = logits.argmax(-1).tolist(), run.gaps.tolist()
        differing += [(number, i, t, b, gaps[i]) for i, (t, b) in enumerate(zip(run.tokens, best)) if t != b]
    divergence, tokens = torch.cat(kl), sum(len(run.tokens) for run in runs)
    return Report(
        model=model,
        dtype=llm.engine.config.model.dtype,
        oracle_dtype=oracle_dtype,
        prompts=len(runs),
        tokens=tokens,
        equal_tokens=tokens - len(differing),
        first_logit_difference=max(first),
        largest_logit_difference=max(largest),
        mean_kl=float(divergence.mean()),
        largest_kl=float(divergence.max()),
        differing=differing,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--oracle-dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--prompts", type=Path, help="a text file; otherwise random tokens of these lengths")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    path = hub.resolve(args.model)
    oracle = Oracle(path, args.oracle_dtype)
    llm = LLM(str(path), dtype=args.dtype, device=args.device, skip_tokenizer_init=True)
    try:
        if args.prompts is None:
            prompts = oracle.prompts(args.lengths, args.seed)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            prompts = [tokenizer.encode(line) for line in args.prompts.read_text().splitlines() if line]
        report = compare(llm, oracle.greedy(prompts, args.max_tokens), args.model, args.oracle_dtype)
    finally:
        llm.close()
    print(json.dumps(asdict(report)) if args.json else report)


if __name__ == "__main__":
    main()
