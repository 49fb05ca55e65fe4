"""A process that starts an engine with no kernel compiled, then sends steps of every kind; its last line is JSON.

`python cold_start.py CHECKPOINT '{"option": ...}'`; the environment names an empty cache.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from rapid_infer import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))


class _Notes(logging.Handler):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(record.getMessage())


def main(path: str, options: dict[str, Any]) -> dict[str, Any]:
    """{"warnings", "at_start": kernels that this process compiled itself in the constructor, "later": after it}."""
    from triton import knobs

    warnings: list[str] = []
    logging.getLogger("rapid_infer").addHandler(_Notes(warnings))

    compiled: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(f"{src.fn.__module__}.{src.fn.__name__} {src.signature} {src.constants}")

    knobs.compilation.listener = listen
    with LLM(path, skip_tokenizer_init=True, load_format="dummy", **options) as llm:
        at_start = list(compiled)
        compiled.clear()
        every_kind_of_step(llm)
        return {"warnings": warnings, "at_start": at_start, "later": compiled}


def every_kind_of_step(llm: LLM) -> None:
    from gpu_traffic import PROFILES, params, prompts

    from rapid_infer.worker.graph_runner import row_buckets, token_buckets

    scheduler = llm.engine.config.scheduler
    limit = llm.engine.config.model.max_model_len - 40
    tokens = sorted({n for size in token_buckets(scheduler.max_num_batched_tokens) for n in (size - 1, size, size + 1)})
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for n in tokens:
        # One prompt, and several as long as all of them together.
        llm.generate(prompts([min(n, limit)], seed=n), greedy)
        rows = min(max(n // 50, 1), scheduler.max_num_seqs)
        llm.generate(prompts([max(n // rows, 1)] * rows, seed=n + 1), greedy)
        scored = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
        llm.generate(prompts([min(n, limit)], seed=n + 2), scored)
    sizes = sorted({n for size in row_buckets(scheduler.max_num_seqs) for n in (size - 1, size) if n > 0})
    for rows in sizes:
        for profile in PROFILES:
            llm.generate(prompts([7] * rows, seed=rows), params(profile, rows, max_tokens=4))
            one = params(profile, rows, max_tokens=4, logprobs=3, prompt_logprobs=2)
            llm.generate(prompts([9] * min(rows, 5), seed=rows), one)
    # After a context, in one piece and in many; contexts that rows share.
    [long] = prompts([limit - 70], seed=1)
    for more in (1, 2, 17, 64):
        llm.generate([long + prompts([more], seed=more)[0]], greedy)
    llm.generate([long[: limit // 2] + tail for tail in prompts([5, 6, 7, 8], seed=3)], greedy)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
