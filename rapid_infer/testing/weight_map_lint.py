"""Finds faults of a weight map without weights, by running each rule's own example names through the table."""

from __future__ import annotations

from collections.abc import Iterator

from rapid_infer.loader.rules import EXPERT, Ignore, Ignored, Place, Rename, Rule, Target
from rapid_infer.loader.weight_map import WeightMap


def lint_weight_map(table: WeightMap) -> list[str]:
    """One line per fault; empty when there is none. Rules are numbered from 1.

    Faults are duplicate, ambiguous and shadowed rules, and names that map twice: the name of a target must map to
    itself, so that a checkpoint saved under the model's names loads again.
    """
    faults = [*_duplicates(table), *_unreached(table), *_ties(table), *_unstable(table)]
    return list(dict.fromkeys(faults))


def _duplicates(table: WeightMap) -> Iterator[str]:
    first: dict[Rule, int] = {}
    for position, rule in enumerate(table.rules):
        if rule in first:
            yield f"duplicate: {_rule_name(table, position)} repeats rule {first[rule] + 1}"
        first.setdefault(rule, position)


def _unreached(table: WeightMap) -> Iterator[str]:
    """Rules that never see a name they are there for, because an earlier rule takes or changes it."""
    for position, rule in enumerate(table.rules):
        for sample in _samples(rule):
            _, _, matched = table.trace_name(sample)
            earlier = [before for before in matched if before < position]
            if position in matched or not earlier or rule in table.rules[:position]:
                continue
            rival = earlier[-1]
            kind = "ambiguous" if sample in _samples(table.rules[rival]) else "shadowed"
            late, first = _rule_name(table, position), _rule_name(table, rival)
            yield f"{kind}: {late} never sees {sample}, which {first} takes first"


def _ties(table: WeightMap) -> Iterator[str]:
    sources: dict[str, str] = {}
    for rule in table.ties:
        if sources.setdefault(rule.source, rule.target) != rule.target:
            yield f"ambiguous: {rule.source} is tied to {sources[rule.source]} and to {rule.target}"
    for rule in table.ties:
        if rule.target in sources:
            yield f"ambiguous: {rule.source} is tied to {rule.target}, which is itself tied to {sources[rule.target]}"


def _unstable(table: WeightMap) -> Iterator[str]:
    for rule in table.rules:
        for sample in _samples(rule):
            targets = table.resolve(sample)
            if isinstance(targets, Ignored):
                continue
            names = {target.name for target in targets}
            for target in targets:
                again = _resolve_again(table, target)
                if not again <= names:
                    changed = ", ".join(sorted(again)) or "nothing"
                    yield f"not idempotent: {sample} maps to {target.name}, which maps to {changed}"


def _resolve_again(table: WeightMap, target: Target) -> set[str]:
    """Names that the name of `target` maps to; the empty name when it is ignored."""
    targets = table.resolve(target.name)
    return {""} if isinstance(targets, Ignored) else {again.name for again in targets}


def _rule_name(table: WeightMap, position: int) -> str:
    row = table.rules[position].row
    return f"rule {position + 1} ({row.kind} {row.source})"


def _samples(rule: Rule) -> list[str]:
    """Checkpoint names that a rule is there for."""
    match rule:
        case Rename(source, at_start=at_start):
            return [f"{'' if at_start else 'x.'}{source.replace('*', '0')}.weight"]
        case Place(sources=sources):
            return [f"x.{source.path.replace(EXPERT, '0')}{'' if source.bare else '.weight'}" for source in sources]
        case Ignore(pattern):
            return [pattern.replace("**", "x").replace("*", "0")]
        case _:
            return []
