"""Every model over several ranks says what it says on one: greedy, drawn, scored, penalised and masked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dist_models import MODELS

from rapid_infer import LLM, SamplingParams
from rapid_infer.errors import ConfigError

LAYOUTS = [(2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4)]
PROMPTS = [[5, 6, 7, 8, 9, 3], [1, 2, 3], [4] * 21]
OPTIONS = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 96, "max_num_seqs": 8}
GREEDY = SamplingParams(max_tokens=8, temperature=0, logprobs=5, prompt_logprobs=2)
# Drawn from each rank's part of the vocabulary; a greedy row among them.
DRAWN = [SamplingParams(max_tokens=8, temperature=t, seed=4) for t in (0.8, 0.0, 1.3)]
SHAPED = [
    SamplingParams(max_tokens=6, temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=1, n=2),
    SamplingParams(max_tokens=6, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, seed=2, logprobs=3),
    SamplingParams(max_tokens=6, temperature=0.8, seed=3, allowed_token_ids=[3, 77, 150, 198], logit_bias={77: 1.5}),
]


def run(llm: LLM) -> list[Any]:
    """Tokens and scores of all that is asked for."""
    found: list[Any] = []
    for prompts, params in (
        (PROMPTS[:1], [GREEDY]),
        (PROMPTS, [GREEDY] * 3),
        (PROMPTS, DRAWN),
        (PROMPTS, SHAPED),
    ):
        for output in llm.generate(prompts, params):
            scores = [output.prompt_logprobs, *(one.logprobs for one in output.outputs)]
            found.append(([list(one.token_ids) for one in output.outputs], scores))
    return found


def numbers(scores: Any) -> list[tuple[int, float, int]]:
    return [
        (token, value.logprob, value.rank)
        for one in scores
        for place in one or []
        for token, value in (place or {}).items()
    ]


def sizes(name: str, tp: int) -> dict[str, Any]:
    """What of a model's sizes does not suit this many ranks, replaced."""
    kv = MODELS[name][1].get("num_key_value_heads")
    return {"num_key_value_heads": 3} if kv is not None and kv > 1 and tp == 3 else {}


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[..., Path]) -> Callable[..., list[Any]]:
    """What one rank says, asked for once."""
    known: dict[Path, list[Any]] = {}

    def ask(path: Path) -> list[Any]:
        if path not in known:
            with LLM(str(path), **OPTIONS) as llm:
                known[path] = run(llm)
        return known[path]

    return ask


@pytest.mark.usefixtures("on_shared_ranks")
@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_equal_one(
    name: str, tp: int, ep: int, checkpoint: Callable[..., Path], alone: Callable[..., list[Any]]
) -> None:
    path = checkpoint(name, **sizes(name, tp))
    with LLM(str(path), tensor_parallel_size=tp, expert_parallel_size=ep, **OPTIONS) as llm:
        found = run(llm)
        executor = llm.engine.core.executor
        # Of all hidden states and tokens, the same on every rank.
        executor.group.drain()
        if tp == 2 and name in ("llama", "qwen3"):
            files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
            assert all(0 < read < 0.6 * files for read in executor.bytes_read)
    for (tokens, scores), (want_tokens, want) in zip(found, alone(path), strict=True):
        assert tokens == want_tokens
        for got, expected in zip(numbers(scores), numbers(want), strict=True):
            assert (got[0], got[2]) == (expected[0], expected[2])
            assert got[1] == pytest.approx(expected[1], abs=3e-5)


@pytest.mark.parametrize(
    ("name", "changes", "tp", "ep", "message"),
    [
        ("llama", {}, 3, 1, r"num_key_value_heads=2 can neither be split over nor repeated on tensor_parallel_size=3"),
        ("llama", {"intermediate_size": 97}, 2, 1, r"output features=97 cannot be split over tensor_parallel_size=2"),
        ("qwen3_moe", {"moe_intermediate_size": 49}, 4, 2, r"=49 cannot be split over tensor_parallel_size / expert_"),
        ("v3", {"n_routed_experts": 4, "n_group": 2}, 8, 8, r"num_attention_heads=12 cannot be split over .*=8"),
        ("llama", {}, 4, 3, r"expert_parallel_size=3 does not divide tensor_parallel_size=4; use one of \[1, 2, 4\]"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_starts(
    name: str,
    changes: dict[str, Any],
    tp: int,
    ep: int,
    message: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    config = json.loads((checkpoint(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), tensor_parallel_size=tp, expert_parallel_size=ep, load_format="dummy", **OPTIONS)
