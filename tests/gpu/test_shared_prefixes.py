"""Engines whose decode rows read shared blocks once: the tokens of transformers, and of rows that read everything.

In fp32, with groups that grow and vanish and rows that share nothing, with CUDA graphs and without.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_infer import SamplingParams
from rapid_infer.outputs import RequestOutputKind
from rapid_infer.testing import GreedyRun

pytest.importorskip("triton")

from gpu_traffic import prompts

from rapid_infer.ops.providers.triton.attention import decode as attention_decode
from rapid_infer.ops.providers.triton.attention import groups as attention_groups
from rapid_infer.ops.providers.triton.attention import shared as attention_shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAX_TOKENS = 24
SHARED = (384, 256)
"""Tokens that the requests of either group have in common."""
ARRIVALS: dict[int, tuple[int | None, ...]] = {
    0: (0, 0, 0, None),
    4: (1, 1, 1, 1, None),
    8: (0, 0, 1),
    40: (1, 1, None),
}
"""Groups of the requests that come before a step; None: of no group."""


def runs_of(model: Any) -> dict[int, list[GreedyRun]]:
    found: dict[int, list[GreedyRun]] = {}
    prefixes = prompts(list(SHARED), seed=3)
    for step, groups in ARRIVALS.items():
        for n, group in enumerate(groups):
            prefix = tuple(prefixes[group]) if group is not None else ()
            length = len(prefix) + 3 + 7 * n
            found.setdefault(step, []).extend(model.runs((length,), MAX_TOKENS, seed=100 * step + n, prefix=prefix))
    return found


def generate(llm: Any, runs: dict[int, list[GreedyRun]]) -> list[list[int]]:
    """Tokens of all requests, in order of arrival."""
    names: list[str] = []
    got: dict[str, list[int]] = {}
    for step in range(max(runs) + 400):
        for run in runs.get(step, ()):
            names.append(str(len(names)))
            # Requests of a group end one after the other.
            params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS - 2 * (len(names) % 5), ignore_eos=True)
            llm.engine.add_request(names[-1], run.prompt, params, output_kind=RequestOutputKind.FINAL_ONLY)
        for output in llm.engine.step():
            assert output.outputs[0].finish_reason == "length", output.outputs[0].error
            got[output.request_id] = output.outputs[0].token_ids
        if step >= max(runs) and not llm.engine.has_unfinished_requests():
            break
    return [got[name] for name in names]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_shared_blocks_change_no_token(
    model_type: str, eager: bool, tiny: Any, open_llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_groups, "MIN_BLOCKS", 2)
    monkeypatch.setattr(attention_groups, "MIN_SAVED", 4)
    runs = runs_of(tiny(model_type))
    wanted = [run.tokens for step in runs for run in runs[step]]
    calls: list[int] = []
    make_plan = attention_decode.decode_plan

    def noted(*arguments: Any) -> Any:
        plan = make_plan(*arguments)
        if plan.shared is not None:
            calls.append(1)
        return plan

    monkeypatch.setattr(attention_decode, "decode_plan", noted)
    found = {}
    for sharing in (True, False):
        monkeypatch.setattr(attention_shared, "SHARING", sharing)
        calls.clear()
        # Graphs keep what was set when they were recorded, so each setting has an engine: another seed, another engine.
        llm = open_llm(tiny(model_type), block_size=64, enforce_eager=eager, seed=int(sharing))
        found[sharing] = generate(llm, runs)
        assert bool(calls) == sharing
    assert found[True] == found[False]
    assert all(mine == theirs[: len(mine)] for mine, theirs in zip(found[True], wanted, strict=True))
