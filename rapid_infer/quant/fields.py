"""Reads fields of a quantization config by name, and names of modules that one lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import translate
from typing import Any

from rapid_infer.errors import ConfigError

REQUIRED: Any = object()


class Fields:
    """`where` is what the fields belong to in errors, "quantization_config" or "config_groups.group_0.weights"."""

    def __init__(self, values: Mapping[str, Any], where: str = "quantization_config") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} is {values!r}: expected a JSON object")
        self.values, self.where = values, where

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def one_of(self, name: str, *allowed: Any, default: Any = REQUIRED) -> Any:
        """A field of which these values alone are supported; text in any case of letters."""
        value = self.values.get(name)
        if value is None and default is not REQUIRED:
            return default
        found = value.lower() if isinstance(value, str) else value
        # 1 is no true.
        if not any(found == one and type(found) is type(one) for one in allowed):
            raise self.error(name, " or ".join(repr(one) for one in allowed))
        return found

    def group(self, name: str = "group_size", default: int | None = None) -> int | None:
        """Inputs that share a scale; None for -1, all of them."""
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value == 0 or value < -1:
            raise self.error(name, "a positive number of inputs, or -1 for all")
        return None if value == -1 else value

    def block(self, name: str) -> tuple[int, int] | None:
        """Outputs and inputs of a block; None where there is no such field."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) and n > 0 for n in value):
            raise self.error(name, "two sizes such as [128, 128]")
        return value[0], value[1]

    def sub(self, name: str) -> Fields | None:
        value = self.values.get(name)
        return None if value is None else Fields(value, f"{self.where}.{name}")

    def error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.where} has {name}={self.values.get(name)!r}, which is not supported: expected {expected}"
        )


def names_any(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    """Whether a module's full name is one of those that `patterns` name.

    "re:" and a regular expression matches from the start; with `*` a glob is for the whole name or for a module that it
    is in; else whole dotted components anywhere: "lm_head", "mlp.gate", "model.layers.0".
    """
    runs: list[str] = []
    expressions: list[str] = []
    for pattern in patterns or ():
        if pattern.startswith("re:"):
            expressions.append(f"(?:{pattern[3:]})")
        elif "*" in pattern:
            expressions += [translate(pattern), translate(f"{pattern}.*")]
        else:
            runs.append(f".{pattern}.")
    try:
        matches = [re.compile(expression).match for expression in expressions]
    except re.error as error:
        raise ConfigError(f"quantization_config has the pattern {error.pattern!r}: {error}") from error

    def named(name: str) -> bool:
        dotted = f".{name}."
        return any(run in dotted for run in runs) or any(match(name) for match in matches)

    return named
