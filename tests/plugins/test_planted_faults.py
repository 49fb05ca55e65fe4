"""The conformance suite finds what it is for: each planted mistake fails a check with a message that names it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rapid_infer_qwen3.conformance import CASES

from rapid_infer import ModelRegistry
from rapid_infer.models.checkpoint import Checkpoint
from rapid_infer.testing.conformance import Case, Subject, package, ranks, run, tokens

ARCHITECTURE = "Qwen3ForCausalLM"


@pytest.fixture
def planted(request: pytest.FixtureRequest) -> Iterator[Subject]:
    target = f"planted_faults:{request.param}"
    ModelRegistry.register(ARCHITECTURE, target, override=True)
    yield Subject(ModelRegistry.lookup(ARCHITECTURE), Case.read(CASES[ARCHITECTURE], "here"))
    ModelRegistry.unregister(ARCHITECTURE)


@pytest.mark.parametrize(
    ("planted", "check", "said"),
    [
        ("QNormDropped", package.weight_map, r"ignores tensors that .*model\.layers\.0\.self_attn\.q_norm\.weight"),
        ("ReadsByHand", package.config, "head_dim='three' raises ValueError: .*; expected a ConfigError"),
        ("WrongRope", tokens.logits, r"the first that differs is layers\.0\.self_attn: wrong RoPE style"),
        ("SecondScaling", tokens.logits, r"layers\.0\.self_attn: wrong scale of attention scores: .*a second scaling"),
        ("TwiceTheMLP", tokens.logits, r"layers\.1\.mlp: it is 2 times the oracle's, so a scale is .*a second time"),
        ("HeadNotReplicated", ranks.tensor_parallel, r"_size=4: logits of rank \d differ.* is each KV head replicated"),
        ("ReadsAnItem", tokens.graphs, r"not permitted when stream is capturing: aten\.item\.default reads values"),
        (
            "ReadsAList",
            tokens.graphs,
            r"not permitted when stream is capturing: Tensor\.tolist reads values on the host",
        ),
        ("ReadsACopy", tokens.graphs, r"not permitted when stream is capturing: Tensor\.cpu reads values on the host"),
        ("Decides", tokens.graphs, r"not permitted when stream is capturing: aten\.is_nonzero\.default reads values"),
        ("TakesByMask", tokens.graphs, r"not permitted when stream is capturing: aten\.index\.Tensor reads values"),
    ],
    indirect=["planted"],
)
def test_a_planted_mistake_is_named(planted: Subject, check: object, said: str) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=said):
        run(planted, check)  # type: ignore[arg-type]


def test_a_forgotten_stop_id_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ModelRegistry.lookup("LlamaForCausalLM")
    monkeypatch.setattr(Checkpoint, "stop_token_ids", property(lambda self: (self.raw["eos_token_id"],)))
    with pytest.raises(AssertionError, match=r"a stop id is forgotten: generation_config.json says eos_token_id \d+"):
        run(Subject(entry, Case("llama")), tokens.stop_ids)
