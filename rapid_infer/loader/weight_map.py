"""`WeightMap`: the ordered table from checkpoint names to the pieces of a model's parameters.

    WeightMap([
        rename("language_model.model", "model", at_start=True),
        experts(("gate_proj", "up_proj"), "gate_up_proj"),
        experts("down_proj", "down_proj"),
        stack(("q_proj", "k_proj", "v_proj"), "qkv_proj", parts=("q", "k", "v")),
        stack(("gate_proj", "up_proj"), "gate_up_proj"),
        ignore("mtp.**", "multi-token prediction layer"),
        tie("lm_head", "model.embed_tokens"),
    ])

Each rule sees the name as the rules before it left it. What no rule matches keeps its name: `a.b.weight` is the leaf
`weight` of module `a.b`. The table knows no model and no tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from rapid_infer.errors import PluginError
from rapid_infer.loader.rules import Ignored, Place, Rename, Row, Rule, Target, Tie

TIED = Ignored("tied")


@dataclass(frozen=True, init=False)
class WeightMap:
    """An ordered, immutable table of rules; `a + b` is the rules of a, then those of b."""

    rules: tuple[Rule, ...]

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        """PluginError when an entry is no rule."""
        object.__setattr__(self, "rules", tuple(rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise PluginError(f"a weight map is a list of rules (rename, stack, ...), got {rule!r}")

    def __add__(self, other: WeightMap) -> WeightMap:
        return WeightMap(self.rules + other.rules)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The tie rules; whether one holds depends on the model."""
        return tuple(rule for rule in self.rules if isinstance(rule, Tie))

    def resolve(self, name: str, tied: Collection[str] = ()) -> list[Target] | Ignored:
        """Everything that tensor `name` fills (several targets after a split), or why it is not wanted.

        `tied` names the parameters that a tie rule speaks of and that the model at hand shares with their target.
        """
        targets, dropped, _ = self.trace_name(name)
        kept = [target for target in targets if target.name not in tied]
        if targets and not kept:
            return TIED
        return dropped if dropped is not None and not kept else kept

    def trace_name(self, name: str) -> tuple[tuple[Target, ...], Ignored | None, tuple[int, ...]]:
        """What `name` becomes, the reason when it is ignored, and the positions of the rules that matched."""
        path, _, leaf = name.rpartition(".")
        traces: tuple[Target, ...] = (Target(path, leaf),)
        dropped: Ignored | None = None
        matched: list[int] = []
        for position, rule in enumerate(self.rules):
            after: list[Target] = []
            for trace in traces:
                result = rule.apply_rule(trace)
                if result is not None:
                    matched.append(position)
                if isinstance(result, Ignored):
                    dropped = result
                else:
                    after.extend(result or (trace,))
            traces = tuple(after)
        return traces, dropped, tuple(dict.fromkeys(matched))

    def sources(self, module: str) -> tuple[str, ...]:
        """Names that a checkpoint may have for what fills `module`, one for each part, and one expert's for experts.

        The table read backwards: for files that are not there. Of several names for a part it gives the longest.
        """
        places = (rule.undo(module) for rule in self.rules if isinstance(rule, Place))
        names = dict.fromkeys(next(filter(None, places), (module,)), False)
        for rule in reversed(self.rules):
            for name, started in list(names.items()):
                # What the start of a name was before tells nothing of a name that began otherwise.
                if not isinstance(rule, Rename) or (started and rule.at_start) or not (before := rule.undo(name)):
                    continue
                del names[name]
                names |= dict.fromkeys(before, started or rule.at_start)
        return tuple(name for name in names if self._fills(f"{name}.weight", module))

    def _fills(self, name: str, module: str) -> bool:
        targets = self.resolve(name)
        return not isinstance(targets, Ignored) and any(target.path == module for target in targets)

    def rows(self) -> list[Row]:
        """The table as (kind, source, target, note), in order."""
        return [rule.row for rule in self.rules]

    def __str__(self) -> str:
        rows = [Row("rule", "checkpoint", "model", "note"), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
