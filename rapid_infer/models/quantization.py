"""Where a checkpoint says how it is quantized: config.json, or a file beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rapid_infer.errors import ConfigError

KEYS = {"quantization_config": "modelopt", "compression_config": "compressed-tensors"}
SIDE_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files that tools wrote instead. Of both: the method of those that name none."""


def quantization_config(directory: Path, configs: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first of `configs` that has one counts; `quant_method` is filled in. None: not quantized.

    ConfigError for one that is no JSON object, or where a file beside config.json names another algorithm.
    """
    named = "config.json"
    entries = (
        _named(config[key], directory / named, KEYS[key]) for config in configs for key in KEYS if config.get(key)
    )
    found = next(entries, None)
    for file, method in SIDE_FILES.items():
        if not (directory / file).is_file():
            continue
        side = _side_file(directory / file, method)
        if found is None:
            found, named = side, file
        elif _algorithm(found) != _algorithm(side):
            raise ConfigError(
                f"{directory} says in {named} that it is quantized with {_algorithm(found)}, and in {file} with "
                f"{_algorithm(side)}; remove the one that does not belong to the weights"
            )
    return found


def _side_file(file: Path, method: str) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON ({error})") from error
    inner = values.get("quantization") if isinstance(values, dict) else None
    return _named(values if inner is None else inner, file, method)


def _named(values: Any, file: Path, method: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{file} has a quantization config {values!r}: expected a JSON object")
    return {**values, "quant_method": values.get("quant_method") or method}


def _algorithm(config: Mapping[str, Any]) -> str:
    method = str(config["quant_method"]).removesuffix("_fp4")
    return f"{method} {config['quant_algo']}" if method == "modelopt" and config.get("quant_algo") else method
