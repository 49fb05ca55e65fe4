"""What families of checkpoints have in common: from the config and the files to the format of each module."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rapid_infer.errors import ConfigError
from rapid_infer.quant.fields import Fields
from rapid_infer.quant.formats.base import Format
from rapid_infer.quant.method import ExpertsMethod, HeadMethod, QuantMethod
from rapid_infer.quant.plain import PlainExperts, PlainHead, PlainMethod
from rapid_infer.quant.quantized import QuantizedExperts, QuantizedHead, QuantizedLinear
from rapid_infer.quant.stored import StoredModules, StoredPart

logger = logging.getLogger(__name__)


class FileScheme:
    """A family: `excluded` and `format` say what the config means for a module of the checkpoint.

    The files count more than the config: a module whose leaves are plain is plain, one whose leaves are quantized is
    quantized, whatever the config says of it. Where there are no files, the config decides.
    """

    name = ""
    listed: Callable[[str], bool]
    """Whether the config lists a module of the checkpoint as one that is left as it was."""

    def __init__(self, config: Mapping[str, Any], modules: StoredModules) -> None:
        self.fields, self.modules = Fields(config), modules
        self._told: set[str] = set()
        self.read()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], modules: StoredModules) -> FileScheme:
        return cls(config, modules)

    def read(self) -> None:
        """Reads the fields, `listed` too. ConfigError for one that is not supported."""
        raise NotImplementedError

    def excluded(self, name: str) -> bool:
        """Whether the config leaves the checkpoint's module `name` as it was."""
        return self.listed(name)

    def format(self, part: StoredPart) -> Format:
        """Of a module that is quantized, also where the config excludes it."""
        raise NotImplementedError

    def method(self, module: str) -> QuantMethod:
        found = self._decide(module, module)
        return PlainMethod() if found is None else QuantizedLinear(found)

    def experts(self, module: str) -> ExpertsMethod:
        found = self._decide(module, f"{module}.gate_up_proj", f"{module}.down_proj")
        return PlainExperts() if found is None else QuantizedExperts(found)

    def head(self, module: str) -> HeadMethod:
        found = self._decide(module, module)
        return PlainHead() if found is None else QuantizedHead(found)

    def _decide(self, module: str, *sources: str) -> Format | None:
        parts = self.modules.of(*sources)
        if not parts:
            return None
        excluded = [self.excluded(part.name) for part in parts]
        quantized = [not without if part.tensors is None else part.quantized for part, without in zip(parts, excluded)]
        if len(set(quantized)) > 1:
            raise _mixed(module, parts, ["quantized" if one else "not quantized" for one in quantized])
        if parts[0].tensors is not None and any(without == one for without, one in zip(excluded, quantized)):
            self._tell(parts[0].name, quantized[0])
        if not quantized[0]:
            return None
        formats = [self.format(part) for part in parts]
        if len(set(formats)) > 1:
            raise _mixed(module, parts, [repr(one) for one in formats])
        return formats[0]

    def _tell(self, name: str, quantized: bool) -> None:
        state = "quantized" if quantized else "not quantized"
        if state not in self._told:
            self._told.add(state)
            logger.info("%s and what is like it is %s in the files, unlike in the config: the files count", name, state)


def _mixed(module: str, parts: tuple[StoredPart, ...], states: list[str]) -> ConfigError:
    seen: dict[str, list[str]] = {}
    for part, state in zip(parts, states):
        seen.setdefault(state, []).append(part.name)
    told = "; ".join(
        f"{state}: {names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}" for state, names in seen.items()
    )
    return ConfigError(
        f"{module} is one matrix of {len(parts)} in the checkpoint, which must be stored alike, and they are not "
        f"({told}); use a checkpoint that quantizes all of them in one format, or none"
    )
