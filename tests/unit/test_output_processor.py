"""From the engine's steps to a user's text: what is held back comes at the end, and no unwatched step is lost."""

from __future__ import annotations

from typing import Any

import pytest

from rapid_infer.engine.results import Finished, StepOutputs
from rapid_infer.frontend import OutputProcessor
from rapid_infer.outputs import FinishReason, RequestOutput, RequestOutputKind
from rapid_infer.params import SamplingParams
from rapid_infer.text import Detokenizer

ENDS = [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR]
FINAL = RequestOutputKind.FINAL_ONLY


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models

        self._backend = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
        self._backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])

    def detokenizer(self, prompt: list[int], skip_special_tokens: bool) -> Detokenizer:
        return Detokenizer(self._backend, prompt, skip_special_tokens=skip_special_tokens)

    def special_stops(self, params: SamplingParams) -> dict[int, str]:
        return {}


def processor() -> OutputProcessor:
    tokenizer: Any = Bytes()
    return OutputProcessor(tokenizer)


def add(outputs: OutputProcessor, name: str, kind: RequestOutputKind = FINAL, **params: Any) -> RequestOutput:
    output = RequestOutput(name, None, list(b"prompt "), [])
    outputs.add(output, SamplingParams(max_tokens=100, **params), kind, [f"{name}/0"])
    return output


def ended(name: str, reason: FinishReason) -> Finished:
    return Finished(f"{name}/0", reason, "why" if reason is FinishReason.ERROR else None, 0)


@pytest.mark.parametrize("reason", ENDS)
@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize(
    ("stop", "given", "text"),
    [
        (None, b"ab\xe2\x98", "ab\ufffd\ufffd"),
        ("never", b"ab\xe2\x98", "ab\ufffd\ufffd"),
        ("b\ufffd\ufffd!", b"ab\xe2\x98", "ab\ufffd\ufffd"),
        ("ab!", b"ab", "ab"),
        ("ab!", b"ab\xe2", "ab\ufffd"),
        # What the end alone completes was never watched for.
        ("b\ufffd", b"ab\xe2", "ab\ufffd"),
        ("b\ufffd", b"ab\xe2\x98", "ab\ufffd\ufffd"),
    ],
)
def test_what_was_held_back_comes_at_the_end(
    stop: str | None, given: bytes, text: str, kind: RequestOutputKind, reason: FinishReason
) -> None:
    outputs = processor()
    add(outputs, "a", kind, stop=stop)
    pieces = [output for token in given for output in outputs.process(StepOutputs(["a/0"], [token]))[0]]
    pieces += outputs.process(StepOutputs(finished=[ended("a", reason)]))[0]
    shown = [completion.text for piece in pieces for completion in piece.outputs]
    assert ("".join(shown) if kind is RequestOutputKind.DELTA else shown[-1]) == text
    last = pieces[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == (reason, None)
    assert pieces[-1].finished
    assert len(outputs) == 0


def steady(outputs: OutputProcessor, names: list[str], texts: list[bytes]) -> None:
    """Steps of a batch that just goes on: the same list each time."""
    for tokens in zip(*texts, strict=True):
        assert outputs.process(StepOutputs(names, list(tokens))) == ([], [])


@pytest.mark.parametrize("between", ["nothing", "discard", "add", "watch"])
def test_steps_that_nobody_watched_are_not_lost(between: str) -> None:
    outputs = processor()
    a, _ = add(outputs, "a"), add(outputs, "b")
    steady(outputs, ["a/0", "b/0"], [b"hello", b"other"])
    if between == "discard":
        assert outputs.discard(["b", "unknown"]) == ["b/0"]
    elif between in ("add", "watch"):
        add(outputs, "c", FINAL if between == "add" else RequestOutputKind.CUMULATIVE)
    steady(outputs, ["a/0", "b/0"], [b" you", b" one"])
    (only,), stopped = outputs.process(StepOutputs(["a/0"], list(b"!"), [ended("a", FinishReason.LENGTH)]))
    assert only is a
    assert (a.outputs[0].text, stopped) == ("hello you!", [])
    assert bytes(a.outputs[0].token_ids) == b"hello you!"
    if between in ("nothing", "add", "watch"):
        (last,), _ = outputs.process(StepOutputs(finished=[ended("b", FinishReason.ABORT)]))
        assert last.outputs[0].text == "other one"
    assert "a" not in outputs
    assert "b" not in outputs
