"""One start in this process, timed phase by phase; the last line of the output is its JSON.

Run by bench_loading.py as `python -m common.start_once '{"model": ..., "kwargs": ..., "spawned": ...}'`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

PROMPT = list(range(3, 19))


def main(request: dict[str, Any]) -> dict[str, Any]:
    """`spawned`: `time.time()` just before this process was started, so that the interpreter's own start counts.

    Returns {"phases": [[name, depth, seconds], ...], "load_s", "bytes_read", "peak_rss_bytes", "rss_before_bytes",
    "first_token_s", "next_token_s", "total_s"}; total: from `spawned` to the first token.
    """
    interpreter_s = time.time() - request["spawned"]
    started = time.perf_counter()
    from common.monitor import peak_rss
    from rapid_infer import profiling
    from rapid_infer.llm_engine import LLMEngine
    from rapid_infer.params import SamplingParams

    imported = time.perf_counter()
    before = peak_rss()
    with profiling.durations() as spans:
        engine = LLMEngine(request["model"], skip_tokenizer_init=True, **request["kwargs"])
    loaded = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    tokens = []
    # The prefix cache knows no prompt twice: the second differs in its first token.
    for first in range(2):
        began = time.perf_counter()
        engine.add_request(str(first), [first, *PROMPT], params)
        while engine.has_unfinished_requests():
            engine.step()
        tokens.append(time.perf_counter() - began)
        if not first:
            total_s = time.time() - request["spawned"]
    report = engine.executor.built.report
    imports = imported - started
    import torch

    named = [(span.name, span.depth, span.seconds) for span in spans]
    rest = loaded - imported - sum(seconds for _, depth, seconds in named if depth == 0)
    result = {
        "phases": [
            ("interpreter", 0, interpreter_s),
            ("import rapid_infer", 0, imports),
            *named,
            ("rest of the engine", 0, rest),
            ("first token", 0, tokens[0]),
        ],
        "load_s": report.seconds if report else None,
        "bytes_read": report.bytes_read if report else None,
        "rss_before_bytes": before,
        "peak_rss_bytes": peak_rss(),
        "peak_gpu_allocated_bytes": torch.cuda.max_memory_allocated() if engine.config.device == "cuda" else None,
        "first_token_s": tokens[0],
        "next_token_s": tokens[1],
        "total_s": total_s,
    }
    engine.close()
    return result


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
