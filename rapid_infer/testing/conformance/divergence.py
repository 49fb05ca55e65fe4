"""Where a model leaves the oracle first, and which single mistake would explain it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from rapid_infer.layers.attention import Attention
from rapid_infer.testing.conformance.subject import Rank, Subject
from rapid_infer.testing.layer_outputs import Difference, first_beyond, layer_outputs, relative

TOLERANCE = 1e-3
"""Of the largest value: far above rounding in fp32, far below what a mistake makes."""


def explain(subject: Subject, tokens: list[int]) -> str:
    """In words: the first module whose output differs from the oracle's for this prompt, and what would mend it."""
    reference = getattr(subject.oracle, "model", None)
    if reference is None:
        return "the oracle shows no layers (an attribute `model`, an nn.Module), so the first that differs is not known"
    rank = subject.rank()
    theirs = _outputs(reference, lambda: subject.oracle.logits([tokens]))
    ours = _outputs(rank.model, lambda: rank.logits(tokens))
    shared = (Difference(place, 0, relative(x, theirs[place])) for place, x in ours.items() if place in theirs)
    place = first_beyond(list(shared), TOLERANCE)
    if place is None:
        return (
            "all layers agree in one forward of the whole prompt: look at what happens between steps (cache, positions)"
        )
    return (
        f"the first that differs is {place}{_scaled(ours[place], theirs[place])}{_mended(rank, tokens, place, theirs)}"
    )


def _scaled(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape:
        return f" (its shape is {list(ours.shape)}, the oracle's {list(theirs.shape)})"
    ratio = float((ours * theirs).sum() / (theirs * theirs).sum())
    if relative(ours, ratio * theirs) <= TOLERANCE:
        return f": it is {ratio:.5g} times the oracle's, so a scale is missing or applied a second time"
    return ""


Attentions = list[Attention]


def _mended(rank: Rank, tokens: list[int], place: str, theirs: dict[str, Tensor]) -> str:
    """Tries the usual mistakes of attention, one at a time, and says which one is it."""
    attentions = [module for module in rank.model.modules() if isinstance(module, Attention)]
    for words, change in _hypotheses(attentions):
        with change():
            if relative(_outputs(rank.model, lambda: rank.logits(tokens))[place], theirs[place]) <= TOLERANCE:
                return f": {words}"
    return ""


def _hypotheses(attentions: Attentions) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each in words, with what changes all of `attentions` accordingly while it is entered."""
    if not attentions:
        return
    one = attentions[0]
    if one.rope is not None:
        other = not one.rope.interleaved
        pairs = "(2i, 2i + 1)" if other else "(i, i + dim / 2)"
        yield (
            f"wrong RoPE style: with interleaved={other}, which turns pairs {pairs}, it is the oracle's",
            partial(_changed, attentions, "rope", lambda a: replace(a.rope, interleaved=other)),
        )
    used = one.params.scale
    for scale in dict.fromkeys((one.head_dim**-0.5, used**0.5, used**2, 1.0)):
        second = ": a second scaling" if abs(scale - used**0.5) < 1e-9 else ""
        yield (
            f"wrong scale of attention scores: with {scale:.5g} instead of {used:.5g} it is the oracle's{second}",
            partial(_changed, attentions, "params", partial(_with_scale, scale)),
        )
    if any(norm is not None for norm in one._norms):
        yield (
            "without q_norm and k_norm it is the oracle's",
            partial(_changed, attentions, "_norms", lambda a: (None, None)),
        )


def _with_scale(scale: float, attention: Attention) -> Any:
    return replace(attention.params, scale=scale)


@contextmanager
def _changed(attentions: Attentions, name: str, value: Callable[[Any], Any]) -> Iterator[None]:
    before = [getattr(one, name) for one in attentions]
    for one in attentions:
        setattr(one, name, value(one))
    try:
        yield
    finally:
        for one, old in zip(attentions, before):
            setattr(one, name, old)


def _outputs(model: nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Those of the layers, then the logits."""
    logits: list[Tensor] = []
    found = layer_outputs(model, lambda: logits.append(run()))
    return {**found, "the head (logits)": logits[0].flatten(0, -2).float()}
