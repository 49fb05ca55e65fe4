"""rapid_infer and transformers' `generate` in one process, taking turns, so that a machine's moods meet both.

python benchmarks/compare_transformers.py [--model DIR] [--threads 2] [--rounds 6] [--output-len 64]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

INPUT_LEN = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of both; default: one per core")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    from rapid_infer import LLM, SamplingParams, hub

    llm = LLM(args.model, num_threads=args.threads)
    peer = AutoModelForCausalLM.from_pretrained(hub.resolve(args.model), dtype=torch.bfloat16, trust_remote_code=False)
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    rng = random.Random(1)

    def prompts(batch: int) -> list[list[int]]:
        return [[rng.randrange(100, llm.engine.core.info.vocab_size) for _ in range(INPUT_LEN)] for _ in range(batch)]

    def ours(batch: int) -> float:
        llm.reset_prefix_cache()
        ids = prompts(batch)
        start = time.perf_counter()
        llm.generate(ids, params)
        return time.perf_counter() - start

    def theirs(batch: int) -> float:
        ids = torch.tensor(prompts(batch))
        start = time.perf_counter()
        peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.output_len,
            min_new_tokens=args.output_len,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - start

    for batch in args.batch_sizes:
        ours(batch), theirs(batch)
        pairs = [(ours(batch), theirs(batch)) for _ in range(args.rounds)]
        mine, other = zip(*pairs)
        tokens = batch * args.output_len
        print(
            f"batch {batch}: rapid_infer {tokens / min(mine):.1f} tok/s, transformers {tokens / min(other):.1f} tok/s, "
            f"ratio {min(other) / min(mine):.2f} of the best, "
            f"{statistics.median(other) / statistics.median(mine):.2f} of the medians"
        )


if __name__ == "__main__":
    main()
