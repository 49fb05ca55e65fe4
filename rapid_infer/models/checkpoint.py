"""A checkpoint directory's configuration: config.json, which names the architecture, then transformers' AutoConfig."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rapid_infer.errors import ConfigError, RequestError
from rapid_infer.params import SamplingParams, defaults_of

CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True)
class Checkpoint:
    """`raw` is config.json as it stands, `generation` generation_config.json or empty."""

    path: Path
    raw: dict[str, Any]
    generation: dict[str, Any]

    @property
    def architecture(self) -> str:
        return self.raw["architectures"][0]

    @cached_property
    def quantization_config(self) -> dict[str, Any] | None:
        """Of config.json, else of the file beside it that older tools write; `quant_method` says whose it is.

        ConfigError where two of them name unlike algorithms.
        """
        from rapid_infer.models.quantization import quantization_config

        return quantization_config(self.path, (self.raw, self._text))

    @property
    def _text(self) -> dict[str, Any]:
        text = self.raw.get("text_config")
        return text if isinstance(text, dict) else self.raw

    @property
    def dtype(self) -> str | None:
        """The dtype that config.json names, under its new or its old key."""
        for source in (self._text, self.raw):
            value = source.get("dtype") or source.get("torch_dtype")
            if value:
                return str(value).removeprefix("torch.")
        return None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids: those of config.json and those of generation_config.json, which often differ.

        Where neither file says anything, the config class's own. A front adds its tokenizer's.
        """
        ids = [*_eos(CONFIG, self.raw), *_eos(CONFIG, self._text), *_eos(GENERATION, self.generation)]
        if not ids:
            ids = _eos(CONFIG, {"eos_token_id": getattr(self.hf_config.get_text_config(), "eos_token_id", None)})
        return tuple(dict.fromkeys(ids))

    @cached_property
    def hf_config(self) -> Any:
        """The transformers config object. ConfigError for what transformers refuses; runs no code of the checkpoint."""
        from transformers import AutoConfig

        file, model_type = self.path / CONFIG, self.raw.get("model_type")
        try:
            with _plain_docstrings():
                return AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        except Exception as error:
            text = " ".join(str(error).split())
            if "trust_remote_code" in text:
                raise ConfigError(
                    f"{file} has auto_map={self.raw.get('auto_map')!r}: code in the checkpoint, which is never run; "
                    f"expected a model_type that transformers knows, got {model_type!r}. Install a model package that "
                    f"brings the config class (AutoConfig.register({model_type!r}, ...) in its module), or a "
                    "transformers that has it"
                ) from None
            suspects = _no_quantities(self._text)
            hint = f"; null, zero or text where a quantity may be expected: {', '.join(suspects)}" if suspects else ""
            raise ConfigError(f"{file} cannot be read as a model config: {text}{hint}") from error


def _eos(file: str | Path, values: dict[str, Any]) -> list[int]:
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"{file} has eos_token_id={value!r}: expected a token id or a list of token ids")
    return ids


def _no_quantities(values: dict[str, Any]) -> list[str]:
    """Settings of RoPE, and fields with the name of a quantity, that are none: transformers does not name them all."""
    rope = values.get("rope_scaling") or values.get("rope_parameters")
    inner = [(k, v) for k, v in rope.items() if k not in ("type", "rope_type")] if isinstance(rope, dict) else []
    outer = [(k, v) for k, v in values.items() if k.startswith(("num_", "rope_theta", "original_")) or "_size" in k]
    return [f"{key}={value!r}" for key, value in inner + outer if not value or isinstance(value, str)]


@contextmanager
def _plain_docstrings() -> Iterator[None]:
    """Where a config class has its docstring filled in, transformers imports all of its model code for that: seconds.

    Inside, the decorator that does so leaves classes as they are.
    """
    from transformers import utils

    original = getattr(utils, "auto_docstring", None)

    def skip(decorated: Any = None, **options: Any) -> Any:
        return decorated if decorated is not None else lambda decorated: decorated

    if original is not None:
        utils.auto_docstring = skip
    try:
        yield
    finally:
        if original is not None:
            utils.auto_docstring = original


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read config.json and generation_config.json.

    ConfigError when config.json is absent, malformed or names no architecture, and for values in generation_config.json
    that no request could use.
    """
    path = Path(path)
    raw = _read_json(path / CONFIG, required=True)
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ConfigError(
            f"{path / CONFIG} has architectures={architectures!r}: expected a list such as "
            '["Qwen3ForCausalLM"], which says which plugin serves the model'
        )
    generation = _read_json(path / GENERATION, required=False)
    _eos(path / CONFIG, raw)
    _check_generation(path / GENERATION, generation)
    return Checkpoint(path, raw, generation)


def _check_generation(file: Path, generation: dict[str, Any]) -> None:
    _eos(file, generation)
    sample = generation.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        raise ConfigError(f"{file} has do_sample={sample!r}: expected true or false")
    for name, value in generation.items():
        try:
            SamplingParams.from_dict(defaults_of({name: value}))
        except RequestError as error:
            raise ConfigError(f"{file} has {name}={value!r}, but {error}; correct or remove it") from error


def _read_json(path: Path, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if not required:
            return {}
        names = sorted(p.name for p in path.parent.iterdir())[:8] if path.parent.is_dir() else []
        found = f"found {', '.join(names)}" if names else "the directory is empty or absent"
        raise ConfigError(f"no config.json in {path.parent}: {found}; expected a Hugging Face model directory")
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON (line {error.lineno}: {error.msg})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}: expected a JSON object")
    return value
