"""Rules of a weight map: each turns one dotted name into others, or says that the tensor is not wanted.

Rules match whole dotted components, never parts of them: `up_proj` does not match inside `gate_up_proj`. A rule knows
no model and no tensor; `WeightMap` runs them in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from rapid_infer.errors import PluginError
from rapid_infer.layers.parameter import Part
from rapid_infer.loader.index_map import IndexMap, Section, chain

Components = tuple[str, ...]


@dataclass(frozen=True)
class Ignored:
    """A tensor that no parameter wants, and why."""

    why: str


@dataclass(frozen=True)
class NameTrace:
    """A name on its way through the table, with what the rules so far have found out about it."""

    name: Components
    part: Part = None
    expert: int | None = None
    index: IndexMap | None = None

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


@runtime_checkable
class Rule(Protocol):
    """One line of a weight map."""

    def apply_rule(self, trace: NameTrace) -> tuple[NameTrace, ...] | Ignored | None:
        """What becomes of `trace`; None when the rule does not match it."""
        ...

    def row(self) -> Row:
        """How the rule is printed."""
        ...

    def samples(self) -> tuple[str, ...]:
        """Checkpoint names that the rule is there for; the linter runs them through the whole table."""
        ...


@dataclass(frozen=True)
class Rename:
    """See `rename`."""

    source: Components
    target: Components
    at_start: bool = False
    index: IndexMap | None = None

    def apply_rule(self, trace: NameTrace) -> tuple[NameTrace, ...] | None:
        name, found = trace.name, False
        out: list[str] = []
        position = 0
        while position < len(name):
            stars = _match_run(self.source, name, position) if position == 0 or not self.at_start else None
            if stars is None:
                out.append(name[position])
                position += 1
            else:
                found = True
                out.extend(_fill_stars(self.target, stars))
                position += len(self.source)
        if not found or not out:
            return None
        return (replace(trace, name=tuple(out), index=chain(trace.index, self.index)),)

    def row(self) -> Row:
        return Row("rename", _dotted(self.source), _dotted(self.target), _note("at start" * self.at_start, self.index))

    def samples(self) -> tuple[str, ...]:
        start = "" if self.at_start else "x."
        return (f"{start}{_sample_of(self.source)}.weight",)


@dataclass(frozen=True)
class Stack:
    """See `stack`."""

    sources: tuple[Components, ...]
    target: Components
    parts: tuple[Part, ...]
    index: IndexMap | None = None

    def apply_rule(self, trace: NameTrace) -> tuple[NameTrace, ...] | None:
        if trace.placed:
            return None
        for source, part in zip(self.sources, self.parts):
            head = _strip_tail(source, trace.name[:-1])
            if head is not None:
                name = (*head, *self.target, trace.name[-1])
                return (replace(trace, name=name, part=part, index=chain(trace.index, self.index)),)
        return None

    def row(self) -> Row:
        return Row("stack", _braces(self.sources), _with_parts(self.target, self.parts), _note("", self.index))

    def samples(self) -> tuple[str, ...]:
        return tuple(f"x.{_dotted(source)}.weight" for source in self.sources)


@dataclass(frozen=True)
class Experts:
    """See `experts`."""

    sources: tuple[Components, ...]
    target: Components
    parts: tuple[Part, ...]
    under: Components
    index: IndexMap | None = None
    fused: IndexMap | None = None

    def apply_rule(self, trace: NameTrace) -> tuple[NameTrace, ...] | None:
        if trace.placed:
            return None
        for source, part in (*zip(self.sources, self.parts), (self.target, None)):
            found = self._match_one(trace, source, part) or self._match_fused(trace, source, part)
            if found is not None:
                return (found,)
        return None

    def _match_one(self, trace: NameTrace, source: Components, part: Part) -> NameTrace | None:
        """`X.experts.E.source.leaf`: one expert."""
        head = _strip_tail(source, trace.name[:-1])
        if not head or not head[-1].isdecimal():
            return None
        above = _strip_tail(self.under, head[:-1])
        if above is None:
            return None
        name = (*above, *self.under, *self.target, trace.name[-1])
        return NameTrace(name, part, int(head[-1]), chain(trace.index, self.index))

    def _match_fused(self, trace: NameTrace, source: Components, part: Part) -> NameTrace | None:
        """`X.experts.source`, with or without a leaf: all experts in one tensor."""
        for stem, leaf in ((trace.name, "weight"), (trace.name[:-1], trace.name[-1])):
            above = _strip_tail((*self.under, *source), stem)
            if above is not None:
                name = (*above, *self.under, *self.target, leaf)
                return NameTrace(name, part, None, chain(trace.index, self.fused))
        return None

    def row(self) -> Row:
        under = _dotted(self.under)
        note = _note("", self.index) + (f"; all in one: {self.fused}" if self.fused else "")
        target = f"{under}.{_with_parts(self.target, self.parts)}"
        return Row("experts", f"{under}.{{E}}.{_braces(self.sources)}", target, note.lstrip("; "))

    def samples(self) -> tuple[str, ...]:
        under = f"x.{_dotted(self.under)}"
        each = tuple(f"{under}.0.{_dotted(source)}.weight" for source in self.sources)
        return (*each, f"{under}.{_dotted(self.target)}")


@dataclass(frozen=True)
class Split:
    """See `split`."""

    source: Components
    into: tuple[tuple[Components, Part], ...]
    sizes: tuple[int, ...]
    index: IndexMap | None = None

    def apply_rule(self, trace: NameTrace) -> tuple[NameTrace, ...] | None:
        head = _strip_tail(self.source, trace.name[:-1])
        if head is None or trace.placed:
            return None
        stored = chain(trace.index, self.index)
        return tuple(
            NameTrace((*head, *target, trace.name[-1]), part, None, chain(stored, Section(self.sizes, piece)))
            for piece, (target, part) in enumerate(self.into)
        )

    def row(self) -> Row:
        targets = ", ".join(_with_parts(target, (part,)) for target, part in self.into)
        sizes = "equal" if len(set(self.sizes)) == 1 else ":".join(map(str, self.sizes))
        return Row("split", _dotted(self.source), targets, _note(f"sizes {sizes}", self.index))

    def samples(self) -> tuple[str, ...]:
        return (f"x.{_dotted(self.source)}.weight",)


@dataclass(frozen=True)
class Ignore:
    """See `ignore`."""

    pattern: Components
    why: str

    def apply_rule(self, trace: NameTrace) -> Ignored | None:
        return Ignored(self.why) if _match_name(self.pattern, trace.name) else None

    def row(self) -> Row:
        return Row("ignore", _dotted(self.pattern), "", self.why)

    def samples(self) -> tuple[str, ...]:
        return (_sample_of(tuple("x" if part == "**" else part for part in self.pattern)),)


@dataclass(frozen=True)
class Tie:
    """See `tie`; applied to the finished name, because it speaks of modules."""

    source: str
    target: str

    def apply_rule(self, trace: NameTrace) -> None:
        return None

    def row(self) -> Row:
        return Row("tie", self.source, self.target, "skipped when the model shares the parameter")

    def samples(self) -> tuple[str, ...]:
        return ()


def rename(source: str, target: str, *, at_start: bool = False, index: IndexMap | None = None) -> Rename:
    """Replaces each run of components `source` by `target`; only at the start of the name with `at_start`.

    `*` in `source` matches one component, and the n-th `*` of `target` is what the n-th matched. `target` "" drops
    the run. `index` says how the stored tensor is laid out. PluginError: empty source, or not as many `*` in both.
    """
    found, put = _split_name(source), tuple(target.split(".")) if target else ()
    if put.count("*") not in (0, found.count("*")) or "**" in (*found, *put):
        raise PluginError(f"rename({source!r}, {target!r}): the target must repeat every * of the source, or none")
    return Rename(found, put, at_start, index)


def stack(
    sources: str | Sequence[str], target: str, parts: Sequence[Part] | None = None, *, index: IndexMap | None = None
) -> Stack:
    """`X.source.leaf` is piece `part` of `X.target.leaf`.

    `parts` defaults to 0, 1, ... in the order of `sources`, or to the whole when there is one source. PluginError:
    empty names, as many parts as sources are needed, or a piece twice.
    """
    names, pieces = _pair_sources("stack", sources, parts)
    return Stack(names, _split_name(target), pieces, index)


def experts(
    sources: str | Sequence[str],
    target: str,
    parts: Sequence[Part] | None = None,
    *,
    under: str = "experts",
    index: IndexMap | None = None,
    fused: IndexMap | None = None,
) -> Experts:
    """`X.under.E.source.leaf` is piece `part` of expert E in `X.under.target.leaf`, which holds all experts.

    The layout with all experts in one tensor is taken too: `X.under.target` and `X.under.source`, without a leaf
    (then it is "weight") or with one. `parts` as in `stack`. `index` describes tensors of one expert, `fused` tensors
    of all experts. PluginError as in `stack`.
    """
    names, pieces = _pair_sources("experts", sources, parts)
    return Experts(names, _split_name(target), pieces, _split_name(under), index, fused)


def split(
    source: str,
    into: Sequence[tuple[str, Part]],
    sizes: Sequence[int] | None = None,
    *,
    index: IndexMap | None = None,
) -> Split:
    """`X.source.leaf` fills several pieces, one after the other along dimension 0 (after `index`).

    `into` holds (target module, part); `sizes` are proportions, equal by default, so one rule serves weights, biases
    and block scales. PluginError: nothing to fill, a piece twice, or not one positive size for each.
    """
    pieces = tuple((_split_name(target), part) for target, part in into)
    shares = tuple(sizes) if sizes is not None else (1,) * len(pieces)
    if not pieces or len(set(pieces)) < len(pieces) or len(shares) != len(pieces) or min(shares) < 1:
        raise PluginError(
            f"split({source!r}): needs distinct pieces and one positive size for each, got {into}, {sizes}"
        )
    return Split(_split_name(source), pieces, shares, index)


def ignore(pattern: str, why: str) -> Ignore:
    """Tensors whose whole name matches are not wanted; `*` is one component, `**` any run, also an empty one."""
    return Ignore(_split_name(pattern), why)


def tie(source_module: str, target_module: str) -> Tie:
    """The tensors of `source_module` repeat those of `target_module` when the model shares one Parameter between them.

    Both are module paths of the model. They are then skipped as "tied", unless the checkpoint has only the source's, or
    both with different values: then the source gets a parameter of its own, whatever the config says. A model that does
    not share the parameter is not affected. PluginError: both are the same module.
    """
    if source_module == target_module:
        raise PluginError(f"tie({source_module!r}, {target_module!r}): a module cannot be tied to itself")
    return Tie(_dotted(_split_name(source_module)), _dotted(_split_name(target_module)))


def _pair_sources(
    kind: str, sources: str | Sequence[str], parts: Sequence[Part] | None
) -> tuple[tuple[Components, ...], tuple[Part, ...]]:
    names = tuple(_split_name(source) for source in ([sources] if isinstance(sources, str) else sources))
    default: tuple[Part, ...] = (None,) if len(names) == 1 else tuple(range(len(names)))
    pieces = default if parts is None else tuple(parts)
    if not names or len(pieces) != len(names) or len(set(pieces)) < len(pieces) or len(set(names)) < len(names):
        raise PluginError(f"{kind}: needs distinct sources and one distinct part for each, got {sources}, {parts}")
    return names, pieces


def _split_name(dotted: str) -> Components:
    parts = tuple(dotted.split("."))
    if not all(parts):
        raise PluginError(f"{dotted!r} is not a dotted name")
    return parts


def _match_run(pattern: Components, name: Components, position: int) -> Components | None:
    """What the stars of `pattern` match when it stands at `position` of `name`; None when it does not."""
    run = name[position : position + len(pattern)]
    if len(run) < len(pattern) or any(want not in ("*", got) for want, got in zip(pattern, run)):
        return None
    return tuple(got for want, got in zip(pattern, run) if want == "*")


def _match_name(pattern: Components, name: Components) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_match_name(pattern[1:], name[start:]) for start in range(len(name) + 1))
    return bool(name) and pattern[0] in ("*", name[0]) and _match_name(pattern[1:], name[1:])


def _strip_tail(tail: Components, name: Components) -> Components | None:
    """What stands before `tail` when `name` ends with it."""
    return name[: -len(tail)] if name[-len(tail) :] == tail else None


def _fill_stars(target: Components, stars: Components) -> Iterator[str]:
    rest = iter(stars)
    return (next(rest) if part == "*" else part for part in target)


def _sample_of(pattern: Components) -> str:
    return _dotted(tuple("0" if part == "*" else part for part in pattern))


def _dotted(name: Components) -> str:
    return ".".join(name)


def _braces(names: tuple[Components, ...]) -> str:
    return _dotted(names[0]) if len(names) == 1 else f"{{{','.join(map(_dotted, names))}}}"


def _with_parts(target: Components, parts: tuple[Part, ...]) -> str:
    return _dotted(target) if parts == (None,) else f"{_dotted(target)}[{','.join(map(str, parts))}]"


def _note(text: str, index: IndexMap | None) -> str:
    return "; ".join(filter(None, (text, str(index) if index else "")))
