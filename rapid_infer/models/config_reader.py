"""Reads a model's fields by name from a transformers config, and says which field is missing or unsupported."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from rapid_infer.errors import ConfigError

T = TypeVar("T", int, float, bool, str)
_REQUIRED: Any = object()


class ConfigReader:
    """Wraps a transformers config (or a plain dict); nested text configs are found.

    Each method returns the field's value, or `default` where the field is absent or null. ConfigError without a
    default.
    """

    def __init__(self, hf_config: Any) -> None:
        inner = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        self._get = inner.get if isinstance(inner, dict) else lambda name: getattr(inner, name, None)

    def integer(self, name: str, default: int | None = _REQUIRED) -> int:
        return self._read(name, int, default)

    def size(self, name: str, default: int | None = _REQUIRED) -> int:
        """An integer that counts something there must be at least one of."""
        value = self.integer(name, default)
        if value is not None and value < 1:
            raise ConfigError(f"config.json has {name}={value!r}: expected an integer >= 1")
        return value

    def number(self, name: str, default: float | None = _REQUIRED) -> float:
        value = self._get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        value = self._read(name, float, default)
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"config.json has {name}={value!r}: expected a finite number")
        return value

    def flag(self, name: str, default: bool | None = _REQUIRED) -> bool:
        return self._read(name, bool, default)

    def text(self, name: str, default: str | None = _REQUIRED) -> str:
        return self._read(name, str, default)

    def optional_integer(self, name: str) -> int | None:
        return None if self._get(name) is None else self._read(name, int, _REQUIRED)

    def _read(self, name: str, kind: type[T], default: Any) -> T:
        value = self._get(name)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"config.json lacks {name!r}: expected {_a(kind)}")
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"config.json has {name}={value!r}: expected {_a(kind)}")
        return value

    def expect(self, name: str, *allowed: Any, default: Any = _REQUIRED) -> Any:
        """A field that this model supports only with certain values."""
        value = self._get(name)
        if value is None:
            value = None if default is _REQUIRED else default
        if value not in allowed:
            listed = " or ".join(repr(a) for a in allowed)
            raise ConfigError(f"config.json has {name}={value!r}, which this model does not support: expected {listed}")
        return value

    def rope_parameters(self) -> dict[str, Any]:
        """RoPE settings in the new form (`rope_parameters`), whichever form the config has."""
        scaling = self._get("rope_scaling") or self._get("rope_parameters") or {}
        if not isinstance(scaling, dict):
            raise ConfigError(f"config.json has RoPE parameters {scaling!r}: expected a JSON object")
        if any(isinstance(value, dict) for value in scaling.values()):
            raise ConfigError(f"config.json has RoPE parameters per layer type ({sorted(scaling)}): expected one set")
        merged = dict(scaling)
        for name in ("rope_theta", "partial_rotary_factor"):
            value = self._get(name)
            if value is not None:
                merged.setdefault(name, value)
        original = self._get("original_max_position_embeddings")
        if original is not None:
            # As in transformers, the one that stands outside counts more.
            merged["original_max_position_embeddings"] = original
        return merged


def _a(kind: type) -> str:
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind]
