"""Likely causes of a checkpoint that does not fit, computed from the names and shapes at hand, each with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rapid_infer.loader.headers import TensorInfo
from rapid_infer.loader.problems import Kind, Problem, group_names
from rapid_infer.loader.rules import Tie

QUANTIZED_LEAF = re.compile(
    r"weight_(scale|scale_inv|scale_2|packed|shape|global_scale|zero_point|g_idx)"
    r"|(input|input_global|activation|pre_quant)_scale"
    r"|qweight|qzeros|scales?|g_idx"
    r"|.*_(blocks|scales)"
)
SAMPLE = 64
MAX_RULES = 4


@dataclass(frozen=True)
class LoadDiagnosis:
    """Why a checkpoint does not fill a model.

    `tensors` is the whole checkpoint, `parameters` all names of the model, `fits(name)` says whether a tensor of that
    name would have filled a parameter that is now empty.
    """

    problems: Sequence[Problem]
    tensors: Mapping[str, TensorInfo]
    parameters: Sequence[str]
    ties: Sequence[Tie]
    fits: Callable[[str], bool]

    def likely_causes(self) -> list[str]:
        """Sentences, the most telling first; empty when nothing stands out."""
        prefix = list(self._foreign_prefix())
        layers = [] if prefix else [*self._absent_layers(), *self._extra_layers()]
        return [
            *prefix,
            *self._quantized(),
            *self._already_cut(),
            *self._transposed(),
            *self._overlapping(),
            *layers,
            *self._untied(),
        ]

    def _names(self, *kinds: Kind) -> list[str]:
        return [problem.name for problem in self.problems if problem.kind in kinds]

    def _foreign_prefix(self) -> Iterator[str]:
        """Tensors that would fit if only their first components were others."""
        unexpected = self._names(Kind.UNEXPECTED)
        wanted = {head for name in self._names(Kind.MISSING, Kind.PARTLY_FILLED) for head in _heads(name)} | {""}
        left = list(unexpected)
        texts: list[str] = []
        rules: list[str] = []
        while left and len(rules) < MAX_RULES:
            found = _best_rename(left, wanted, self.fits)
            if found is None:
                break
            source, target = found
            moved = {name for name in left if _moves(name, source, target, self.fits)}
            left = [name for name in left if name not in moved]
            place = f"the model has '{target}.'" if target else "the model has no prefix"
            texts.append(f"{len(moved)} of {len(unexpected)} unexpected tensors are under '{source}.' where {place}")
            rules.append(f'rename("{source}", "{target}", at_start=True)')
        if rules and 2 * len(left) <= len(unexpected):
            yield f"{'; '.join(texts)}: put {', '.join(rules)} first in the weight map"

    def _quantized(self) -> Iterator[str]:
        names = [name for name in self._names(Kind.UNEXPECTED) if QUANTIZED_LEAF.fullmatch(name.rsplit(".", 1)[-1])]
        names += [name for name in self._names(Kind.DTYPE) if _packed(self.tensors[name].dtype)]
        if names:
            yield (
                f"the checkpoint looks quantized ({len(names)} tensors such as {names[0]}), but the model was built "
                "without that format: see quantization_config in config.json"
            )

    def _already_cut(self) -> Iterator[str]:
        """Nearly all matrices are 1/N of what is expected; a wrong head count would show in a few of them only."""
        shapes = self._shape_problems()
        ratios = [_ratio(problem) for problem in shapes]
        matrices = sum(len(info.shape) > 1 for info in self.tensors.values())
        if ratios and all(ratio > 1 for ratio in ratios) and 2 * len(ratios) >= matrices:
            size = max(ratios)
            yield (
                f"{len(ratios)} tensors have 1/{size} of the expected size in one dimension: the checkpoint looks "
                f"already cut for tensor parallel size {size}: load the full checkpoint"
            )

    def _transposed(self) -> Iterator[str]:
        shapes = self._shape_problems()
        if shapes and all(
            problem.got and problem.expected and len(problem.got) > 1 and problem.got[::-1][:2] == problem.expected[-2:]
            for problem in shapes
        ):
            yield "the matrices are stored as [in, out]: give their rules index=transpose()"

    def _shape_problems(self) -> list[Problem]:
        """Those whose type is right; packed formats have other shapes by nature."""
        packed = set(self._names(Kind.DTYPE))
        return [problem for problem in self.problems if problem.kind is Kind.SHAPE and problem.name not in packed]

    def _overlapping(self) -> Iterator[str]:
        if self._names(Kind.OVERLAP):
            yield (
                "tensors that overlap are no fault of the checkpoint: the layer, or the ParamSpec of its quantization "
                "method, gives them one place; what each part of a merged matrix has for itself needs the "
                "dimension PART"
            )

    def _absent_layers(self) -> Iterator[str]:
        missing = set(self._names(Kind.MISSING))
        layers: dict[str, bool] = {}
        for name in self.parameters:
            layer = _layer(name)
            if layer:
                layers[layer] = layers.get(layer, True) and name in missing
        absent = [layer for layer, empty in layers.items() if empty]
        if absent:
            yield (
                f"no tensor of {', '.join(group_names(absent))} is there: the download is incomplete, or config.json "
                "promises more layers than the checkpoint has"
            )

    def _extra_layers(self) -> Iterator[str]:
        known = {layer for layer in map(_layer, self.parameters) if layer}
        stems = {layer.rsplit(".", 1)[0] for layer in known}
        extra = [layer for layer in map(_layer, self._names(Kind.UNEXPECTED)) if layer and layer not in known]
        extra = [layer for layer in dict.fromkeys(extra) if layer.rsplit(".", 1)[0] in stems]
        if extra:
            yield (
                f"the model has no {', '.join(group_names(extra))}: config.json promises fewer layers than the "
                "checkpoint has, or these are extra layers that the weight map should ignore"
            )

    def _untied(self) -> Iterator[str]:
        for rule in self.ties:
            if any(name.rsplit(".", 1)[0] == rule.source for name in self._names(Kind.MISSING)):
                yield (
                    f"the checkpoint has no {rule.source}, and the model does not share its parameter with "
                    f"{rule.target}: see tie_word_embeddings in config.json"
                )


def _best_rename(names: list[str], wanted: set[str], fits: Callable[[str], bool]) -> tuple[str, str] | None:
    """The change of prefix that makes most of `names` fit; among equals one that keeps the last component."""
    sample = names[:: max(1, len(names) // SAMPLE)]
    best: tuple[tuple[int, bool, int], tuple[str, str]] | None = None
    for source in dict.fromkeys(head for name in sample for head in _heads(name)):
        for target in sorted(wanted - {source}):
            count = sum(_moves(name, source, target, fits) for name in sample)
            rank = (count, source.rsplit(".", 1)[-1] == target.rsplit(".", 1)[-1], -len(source))
            if count and (best is None or rank > best[0]):
                best = rank, (source, target)
    return best[1] if best else None


def _moves(name: str, source: str, target: str, fits: Callable[[str], bool]) -> bool:
    if not name.startswith(f"{source}."):
        return False
    rest = name[len(source) + 1 :]
    return fits(f"{target}.{rest}" if target else rest)


def _heads(name: str) -> Iterator[str]:
    """Leading components of a name up to its first number: "model", "model.layers"."""
    head = ""
    for component in name.split(".")[:-1]:
        if component.isdecimal():
            return
        head = f"{head}.{component}" if head else component
        yield head


def _packed(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 or dtype == torch.int32


def _ratio(problem: Problem) -> int:
    """N when exactly one dimension is 1/N of what is expected, else 0."""
    got, expected = problem.got or (), problem.expected or ()
    differing = [(have, want) for have, want in zip(got, expected) if have != want]
    if len(got) != len(expected) or len(differing) != 1:
        return 0
    have, want = differing[0]
    return want // have if have and want % have == 0 else 0


def _layer(name: str) -> str | None:
    """The name up to its first number: "model.layers.3"."""
    found = re.match(r".+?\.\d+(?![^.])", name)
    return found[0] if found else None
