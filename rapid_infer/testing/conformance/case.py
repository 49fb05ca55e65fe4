"""What a package declares for its own conformance run: tiny sizes, variants of them, and an oracle."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rapid_infer.errors import PluginError
from rapid_infer.registry import Entry, ModelRegistry, reason
from rapid_infer.testing.tiny import TINY

MODULE = "conformance"


@dataclass(frozen=True)
class Case:
    """One architecture at tiny sizes, as `CASES` in a package's `conformance` module has it (plain data).

    model_type   of a config that transformers knows; its model is the oracle
    sizes        keys of that config which differ from `rapid_infer.testing.TINY`
    variants     by name, further changes; these are compared with the oracle and nothing else
    refuses      changes of config.json that the model must refuse by a ConfigError which names them
    gain         of random matrices, as in `random_weights`
    ranks        tensor-parallel sizes to compare with one rank
    oracle       "pkg.mod:Class" in place of transformers: made of the checkpoint's path, `logits(sequences)` gives fp32
                 `[n, length, vocab]` of n sequences of one length, `vocab_size` the number of token ids
    checkpoint   "pkg.mod:function" in place of `make_checkpoint`: `function(path, sizes, dtype)` writes a directory
    """

    model_type: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refuses: Sequence[Mapping[str, Any]] = ()
    gain: float = 1.6
    ranks: Sequence[int] = (2, 4)
    oracle: str | None = None
    checkpoint: str | None = None

    @classmethod
    def read(cls, values: object, where: str) -> Case:
        """PluginError for what is no case."""
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(values, Mapping) or not set(values) <= set(names):
            raise PluginError(f"{where} is {values!r:.120}: expected a dict with keys of {', '.join(names)}")
        case = cls(**values)
        if not case.model_type and not (case.oracle and case.checkpoint):
            raise PluginError(
                f"{where} has no model_type: expected one that transformers knows, or oracle and checkpoint"
            )
        return case

    def config(self, variant: str = "") -> Any:
        """transformers' config of these sizes; it must know `model_type`."""
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, **{**TINY, **self.sizes, **self.variants.get(variant, {})})


def entries_of(distribution: str) -> list[Entry]:
    """The architectures that an installed distribution declares. PluginError when it declares none."""
    wanted = distribution.replace("_", "-").lower()
    entries = [e for e in ModelRegistry.entries() if (e.distribution or "").replace("_", "-").lower() == wanted]
    if not entries:
        known = sorted({e.distribution for e in ModelRegistry.entries() if e.distribution})
        raise PluginError(
            f"{distribution} is not installed, or declares no rapid_infer.models; installed plugins: "
            f"{', '.join(known) or 'none'}. Install it first: `pip install -e FOLDER`"
        )
    return entries


def cases_of(entries: Sequence[Entry]) -> list[tuple[Entry, Case]]:
    """Each architecture with the case that its package declares. PluginError where there is none."""
    return [(entry, case_of(entry)) for entry in entries]


def case_of(entry: Entry) -> Case:
    name = f"{entry.target.split(':')[0].split('.')[0]}.{MODULE}"
    try:
        cases = importlib.import_module(name).CASES
        values = cases[entry.name]
    except Exception as error:
        raise PluginError(
            f"architecture {entry.name!r} ({entry.origin}): cannot read CASES[{entry.name!r}] of {name} "
            f"({reason(error)}); it says which tiny sizes and which oracle a conformance run takes: "
            f'CASES = {{"{entry.name}": {{"model_type": "llama"}}}}'
        ) from error
    return Case.read(values, f"{name}.CASES[{entry.name!r}]")
