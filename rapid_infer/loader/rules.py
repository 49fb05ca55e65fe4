"""Rules of a weight map: each turns one dotted name into others, or says that the tensor is not wanted.

Rules match whole dotted components, never parts of them: `up_proj` does not match inside `gate_up_proj`. A rule knows
no model and no tensor; `WeightMap` runs them in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from rapid_infer.errors import PluginError
from rapid_infer.layers.parameter import Part
from rapid_infer.loader.index_map import IndexMap, Section, chain

EXPERT = "{E}"
"""The component of a source that is an expert's number."""


@dataclass(frozen=True)
class Ignored:
    """A tensor that no parameter wants, and why."""

    why: str


@dataclass(frozen=True)
class Target:
    """Where a checkpoint tensor belongs: piece `part` (of expert `expert`) of parameter `leaf` of module `path`.

    `part` None is the whole parameter, `expert` None no expert or all of them; `index` says how the piece lies in the
    stored tensor, None as it is. On the way through the table: what the rules so far have found out.
    """

    path: str
    leaf: str
    part: Part = None
    expert: int | None = None
    index: IndexMap | None = None

    @property
    def name(self) -> str:
        """Dotted name of the parameter in the model."""
        return f"{self.path}.{self.leaf}" if self.path else self.leaf

    @property
    def placed(self) -> bool:
        """Whether a rule has already said which piece this is."""
        return self.part is not None or self.expert is not None


class Row(NamedTuple):
    """One line of the printed table."""

    kind: str
    source: str
    target: str
    note: str


@dataclass(frozen=True)
class Rename:
    """See `rename`."""

    source: str
    target: str
    at_start: bool = False
    index: IndexMap | None = None

    def apply_rule(self, trace: Target) -> tuple[Target, ...] | None:
        name, found = _run(self.source, self.at_start).subn(self._renamed, f"{trace.name}.")
        path, _, leaf = name[:-1].rpartition(".")
        return (replace(trace, path=path, leaf=leaf, index=chain(trace.index, self.index)),) if found and leaf else None

    def undo(self, name: str) -> tuple[str, ...]:
        """Names of modules that this makes `name` of; none for rules with `*`, which are not undone."""
        if "*" in self.source.split("."):
            return ()
        if not self.target:
            return (f"{self.source}.{name}",)
        before, count = _run(self.target, self.at_start).subn(f"{self.source}.", f"{name}.")
        return (before[:-1],) if count else ()

    def _renamed(self, run: re.Match[str]) -> str:
        stars = iter(run.groups())
        parts = self.target.split(".") if self.target else ()
        return "".join(next(stars) if part == "*" else f"{part}." for part in parts)

    @property
    def row(self) -> Row:
        return Row("rename", self.source, self.target, _join_notes("at start" * self.at_start, self.index))


Fill = tuple[str, Part, IndexMap | None]
"""A piece that a source fills: target, part, and how it lies in the source's tensor."""


@dataclass(frozen=True)
class Source:
    """`X.path.leaf` fills `X.target.leaf` for each of `fills`; `EXPERT` in `path` stands for any number.

    With `bare`, `X.path` alone is taken too, and its leaf is "weight".
    """

    path: str
    fills: tuple[Fill, ...]
    bare: bool = False


@dataclass(frozen=True)
class Place:
    """Says which piece a tensor is. See `stack`, `experts` and `split`."""

    row: Row
    sources: tuple[Source, ...]

    def apply_rule(self, trace: Target) -> tuple[Target, ...] | None:
        if trace.placed:
            return None
        for source in self.sources:
            if found := _tail(source.path, source.bare).fullmatch(trace.name):
                known = found.groupdict()
                above, leaf = known["above"], known["leaf"] or known.get("end") or "weight"
                expert = int(known["expert"]) if "expert" in known else None
                return tuple(
                    Target(f"{above}{target}", leaf, part, expert, chain(trace.index, index))
                    for target, part, index in source.fills
                )
        return None

    def undo(self, name: str) -> tuple[str, ...]:
        """Names of modules that this puts into `name`, the first expert's for all of them."""
        return tuple(
            f"{name.removesuffix(target)}{source.path.replace(EXPERT, '0')}"
            for source in self.sources
            for target, _, _ in source.fills
            if not source.bare and f".{name}".endswith(f".{target}")
        )


@dataclass(frozen=True)
class Ignore:
    """See `ignore`."""

    pattern: str
    why: str

    def apply_rule(self, trace: Target) -> Ignored | None:
        return Ignored(self.why) if re.fullmatch(_pattern(self.pattern), f"{trace.name}.") else None

    @property
    def row(self) -> Row:
        return Row("ignore", self.pattern, "", self.why)


@dataclass(frozen=True)
class Tie:
    """See `tie`; applied to the finished name, because it speaks of modules."""

    source: str
    target: str

    def apply_rule(self, trace: Target) -> None:
        return None

    @property
    def row(self) -> Row:
        return Row("tie", self.source, self.target, "skipped when the model shares the parameter")


Rule = Rename | Place | Ignore | Tie
"""One line of a weight map. `apply_rule` says what becomes of a name, None when the rule does not match it."""


def rename(source: str, target: str, *, at_start: bool = False, index: IndexMap | None = None) -> Rename:
    """Replaces each run of components `source` by `target`; only at the start of the name with `at_start`.

    `*` in `source` matches one component, and the n-th `*` of `target` is what the n-th matched. `target` "" drops
    the run. `index` says how the stored tensor is laid out. PluginError: empty source, or not as many `*` in both.
    """
    _check_names(source)
    found, put = source.split("."), target.split(".")
    if put.count("*") not in (0, found.count("*")) or "**" in (*found, *put):
        raise PluginError(f"rename({source!r}, {target!r}): the target must repeat every * of the source, or none")
    return Rename(source, target, at_start, index)


def stack(
    sources: str | Sequence[str], target: str, parts: Sequence[Part] | None = None, *, index: IndexMap | None = None
) -> Place:
    """`X.source.leaf` is piece `part` of `X.target.leaf`.

    `parts` defaults to 0, 1, ... in the order of `sources`, or to the whole when there is one source. PluginError:
    empty names, as many parts as sources are needed, or a piece twice.
    """
    names, pieces = _pair_sources("stack", sources, parts)
    _check_names(*names, target)
    row = Row("stack", _braces(names), _with_parts(target, pieces), _join_notes(index))
    return Place(row, tuple(Source(name, ((target, part, index),)) for name, part in zip(names, pieces)))


def experts(
    sources: str | Sequence[str],
    target: str,
    parts: Sequence[Part] | None = None,
    *,
    under: str = "experts",
    index: IndexMap | None = None,
    fused: IndexMap | None = None,
) -> Place:
    """`X.under.E.source.leaf` is piece `part` of expert E in `X.under.target.leaf`, which holds all experts.

    The layout with all experts in one tensor is taken too: `X.under.target` and `X.under.source`, without a leaf
    (then it is "weight") or with one. `parts` as in `stack`. `index` describes tensors of one expert, `fused` tensors
    of all experts. PluginError as in `stack`.
    """
    names, pieces = _pair_sources("experts", sources, parts)
    _check_names(*names, target, under)
    into = f"{under}.{target}"
    taken: list[Source] = []
    for name, part in (*zip(names, pieces), (target, None)):
        taken.append(Source(f"{under}.{EXPERT}.{name}", ((into, part, index),)))
        taken.append(Source(f"{under}.{name}", ((into, part, fused),), bare=True))
    note = _join_notes(index, f"all in one: {fused}" if fused else "")
    return Place(Row("experts", f"{under}.{EXPERT}.{_braces(names)}", _with_parts(into, pieces), note), tuple(taken))


def split(
    source: str,
    into: Sequence[tuple[str, Part]],
    sizes: Sequence[int] | None = None,
    *,
    index: IndexMap | None = None,
) -> Place:
    """`X.source.leaf` fills several pieces, one after the other along dimension 0 (after `index`).

    `into` holds (target module, part); `sizes` are proportions, equal by default, so one rule serves weights, biases
    and block scales. PluginError: nothing to fill, a piece twice, or not one positive size for each.
    """
    pieces = [(target, part) for target, part in into]
    shares = tuple(sizes) if sizes is not None else (1,) * len(pieces)
    if not pieces or len(set(pieces)) < len(pieces) or len(shares) != len(pieces) or min(shares) < 1:
        raise PluginError(
            f"split({source!r}): needs distinct pieces and one positive size for each, got {into}, {sizes}"
        )
    _check_names(source, *(target for target, _ in pieces))
    fills = [(target, part, chain(index, Section(shares, n))) for n, (target, part) in enumerate(pieces)]
    targets = ", ".join(_with_parts(target, (part,)) for target, part in pieces)
    note = _join_notes(f"sizes {'equal' if len(set(shares)) == 1 else ':'.join(map(str, shares))}", index)
    return Place(Row("split", source, targets, note), (Source(source, tuple(fills)),))


def ignore(pattern: str, why: str) -> Ignore:
    """Tensors whose whole name matches are not wanted; `*` is one component, `**` any run, also an empty one."""
    _check_names(pattern)
    return Ignore(pattern, why)


def tie(source_module: str, target_module: str) -> Tie:
    """The tensors of `source_module` repeat those of `target_module` when the model shares one Parameter between them.

    Both are module paths of the model. They are then skipped as "tied", unless the checkpoint has only the source's, or
    both with different values: then the source gets a parameter of its own, whatever the config says. A model that does
    not share the parameter is not affected. PluginError: both are the same module.
    """
    if source_module == target_module:
        raise PluginError(f"tie({source_module!r}, {target_module!r}): a module cannot be tied to itself")
    _check_names(source_module, target_module)
    return Tie(source_module, target_module)


def _pair_sources(
    kind: str, sources: str | Sequence[str], parts: Sequence[Part] | None
) -> tuple[tuple[str, ...], tuple[Part, ...]]:
    names = (sources,) if isinstance(sources, str) else tuple(sources)
    default: tuple[Part, ...] = (None,) if len(names) == 1 else tuple(range(len(names)))
    pieces = default if parts is None else tuple(parts)
    if not names or len(pieces) != len(names) or len(set(pieces)) < len(pieces) or len(set(names)) < len(names):
        raise PluginError(f"{kind}: needs distinct sources and one distinct part for each, got {sources}, {parts}")
    return names, pieces


def _check_names(*names: str) -> None:
    for name in names:
        if not all(name.split(".")):
            raise PluginError(f"{name!r} is not a dotted name")


def _pattern(dotted: str) -> str:
    """A regular expression for runs of components, each with its dot behind it; a group for each star."""
    stars = {"*": r"([^.]*\.)", "**": r"(?:[^.]*\.)*"}
    return "".join(stars.get(part) or re.escape(f"{part}.") for part in dotted.split("."))


@cache
def _run(source: str, at_start: bool) -> re.Pattern[str]:
    return re.compile(("^" if at_start else r"(?<![^.])") + _pattern(source))


@cache
def _tail(path: str, bare: bool) -> re.Pattern[str]:
    """For names that end in `path` and a leaf, which may be absent with `bare`."""
    middle = re.escape(path).replace(re.escape(EXPERT), r"(?P<expert>\d+)")
    # gpt-oss writes gate_up_proj_blocks and gate_up_proj_scales for leaves of one tensor of all experts.
    leaf = r"(?:\.(?P<leaf>[^.]+)|_(?P<end>blocks|scales|bias))?" if bare else r"\.(?P<leaf>[^.]+)"
    return re.compile(rf"(?P<above>(?:.*\.)?){middle}{leaf}")


def _braces(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{{{','.join(names)}}}"


def _with_parts(target: str, parts: tuple[Part, ...]) -> str:
    return target if parts == (None,) else f"{target}[{','.join(map(str, parts))}]"


def _join_notes(*notes: object) -> str:
    return "; ".join(str(note) for note in notes if note)
