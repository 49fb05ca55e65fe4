"""The choice of a scheme from a checkpoint's quantization config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rapid_infer.errors import ConfigError, PluginError
from rapid_infer.quant.families import FAMILIES
from rapid_infer.quant.method import QuantScheme
from rapid_infer.quant.plain import PlainScheme
from rapid_infer.quant.stored import StoredModules
from rapid_infer.registry import EntryPointTable, load_target


def select_scheme(quantization_config: Mapping[str, Any] | None, modules: StoredModules | None = None) -> QuantScheme:
    """The scheme for a checkpoint. ConfigError, naming method and supported ones, when none is installed for it.

    `modules`: what the files have for each module. Schemes are classes with `from_config(config, modules)`, found by
    `quant_method`: those of `families`, and installed ones under the entry-point group `rapid_infer.quantization`,
    which count more. PluginError for one that is no `QuantScheme`.
    """
    if not quantization_config:
        return PlainScheme()
    table = EntryPointTable("rapid_infer.quantization")
    method = quantization_config.get("quant_method")
    cls: Any
    if method in table.names():
        cls = table.load(table.lookup(method))
    elif method in FAMILIES:
        cls = load_target(FAMILIES[method])
    else:
        supported = ", ".join(dict.fromkeys(["none (bfloat16, float16, float32)", *FAMILIES, *table.names()]))
        raise ConfigError(
            f"config.json says the weights are quantized with quant_method={method!r}, which nothing installed "
            f"supports (supported: {supported}); use an unquantized checkpoint or "
            f"install a package for {method!r}"
        )
    scheme = cls.from_config(quantization_config, modules or StoredModules())
    if missing := [name for name in ("method", "experts", "head") if not callable(getattr(scheme, name, None))]:
        raise PluginError(
            f"quant_method={method!r}: {cls.__module__}:{cls.__qualname__} has no {', no '.join(missing)}; expected a "
            "QuantScheme, which may derive from PlainScheme for what it leaves unquantized"
        )
    return scheme
