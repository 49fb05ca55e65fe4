"""What the layers of a model give, the runtime's or transformers', and how far two models are apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from rapid_infer.parallel.partial_sum import reduced


def layer_outputs(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """Of embedding, attention, feed-forward, layers and last norm while `run()` runs: fp32 `[tokens, ...]` on the CPU.

    In the order of the forward, under the names of transformers' decoders. A module that is called more than once
    has the tokens of all calls.
    """
    found: dict[str, list[Tensor]] = {}
    hooks = []
    for full, module in model.named_modules():
        name = full.removeprefix("model.")
        parts = name.split(".")
        layer = parts[0] == "layers" and (len(parts) == 2 or (len(parts) == 3 and parts[2] in ("self_attn", "mlp")))
        if layer or name in ("embed_tokens", "norm"):
            hooks.append(module.register_forward_hook(_noting(found, name)))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(calls) for name, calls in found.items()}


def _noting(found: dict[str, list[Tensor]], name: str) -> Any:
    def note(module: nn.Module, args: Any, result: Any) -> None:
        value = result
        if isinstance(result, tuple):
            # A layer of ours gives what is to be added to the residual stream, and the stream.
            pair = name.count(".") == 1 and len(result) == 2 and result[1] is not None
            value = reduced(result[0]) + result[1] if pair else result[0]
        found.setdefault(name, []).append(reduced(value).detach().flatten(0, -2).to("cpu", torch.float32, copy=True))

    return note


@dataclass(frozen=True)
class Difference:
    """How far two outputs of one place are apart: the largest of all values, and `relative`, see `relative`."""

    place: str
    max_abs: float
    relative: float


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference of `[tokens, ...]` in a token, relative to the largest value that b has in that token.

    By tokens, since a model's first token often has values that dwarf all others. Infinite for unlike shapes and NaN.
    """
    if a.shape != b.shape:
        return inf
    if not a.numel():
        return 0.0
    rows, scale = (a - b).abs().flatten(1).amax(1), b.abs().flatten(1).amax(1)
    worst = float((rows / scale.clamp_min(torch.finfo(torch.float32).tiny)).max())
    return worst if worst == worst else inf


def differences(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[Difference]:
    """At the places that both have, in a's order. Of unlike numbers of tokens the last ones are compared: an engine's
    last layer goes on with those alone that are asked for.
    """
    found = []
    for place in (place for place in a if place in b):
        count = min(len(a[place]), len(b[place]))
        one, other = a[place][len(a[place]) - count :], b[place][len(b[place]) - count :]
        largest = float((one - other).abs().max()) if one.shape == other.shape and one.numel() else inf
        found.append(Difference(place, largest if largest == largest else inf, relative(one, other)))
    return found


def first_beyond(found: Sequence[Difference], tolerance: float) -> str | None:
    """The first place that differs by more, relative to its values."""
    return next((one.place for one in found if not one.relative <= tolerance), None)
