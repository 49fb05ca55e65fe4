"""Perplexity of a text that every Python has: the help topics of its standard library."""

from __future__ import annotations

import math
from pydoc_data.topics import topics

from rapid_infer.llm_engine import LLMEngine
from rapid_infer.outputs import RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams


def perplexity(engine: LLMEngine, num_tokens: int = 12_000, window: int = 512) -> float:
    """exp of the mean negative log-probability of each token but the first of its window of `window` tokens.

    Topics come in the order of their names, as they are, with a line end between them; RuntimeError where the engine
    has no tokenizer.
    """
    if engine.tokenizer is None:
        raise RuntimeError("perplexity needs a tokenizer: start the engine without skip_tokenizer_init")
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = engine.tokenizer.encode(text[: num_tokens * 12])[:num_tokens]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    for start in range(0, len(tokens) - 1, window):
        engine.add_request(str(start), tokens[start : start + window], params, output_kind=RequestOutputKind.FINAL_ONLY)
    loss, count = 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = _losses(output)
            loss, count = loss + math.fsum(found), count + len(found)
    return math.exp(loss / count)


def _losses(output: RequestOutput) -> list[float]:
    if output.prompt_logprobs is None:
        raise RuntimeError(f"request {output.request_id} failed: {output.outputs[0].error}")
    places = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [-place[token].logprob for token, place in places if place is not None]
