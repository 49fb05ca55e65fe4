"""A checkpoint directory's configuration. The raw config.json names the architecture; transformers' AutoConfig comes
after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rapid_infer.errors import ConfigError


@dataclass(frozen=True)
class Checkpoint:
    """`raw` is config.json as it stands, `generation` generation_config.json or empty."""

    path: Path
    raw: dict[str, Any]
    generation: dict[str, Any]

    @property
    def architecture(self) -> str:
        return self.raw["architectures"][0]

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        return self.raw.get("quantization_config") or self._text.get("quantization_config")

    @property
    def _text(self) -> dict[str, Any]:
        return self.raw.get("text_config") or self.raw

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
        """End-of-sequence ids: those of config.json and those of generation_config.json, which often differ."""
        ids: dict[int, None] = {}
        for source in (self.raw, self._text, self.generation):
            value = source.get("eos_token_id")
            for token in value if isinstance(value, list) else [value]:
                if isinstance(token, int):
                    ids[token] = None
        return tuple(ids)

    @cached_property
    def hf_config(self) -> Any:
        """The transformers config object. ConfigError for what transformers refuses."""
        from transformers import AutoConfig

        try:
            with _plain_docstrings():
                return AutoConfig.from_pretrained(self.path)
        except Exception as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"{self.path / 'config.json'} cannot be read as a model config: {text}") from error


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

    ConfigError when config.json is absent, malformed or names no architecture.
    """
    path = Path(path)
    raw = _read_json(path / "config.json", required=True)
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ConfigError(
            f"{path / 'config.json'} has architectures={architectures!r}: expected a list such as "
            '["Qwen3ForCausalLM"], which says which plugin serves the model'
        )
    return Checkpoint(path, raw, _read_json(path / "generation_config.json", required=False))


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
