"""Tiny random checkpoints on disk, in the forms that published ones come in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

TINY: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    }
)
"""Sizes that suit most decoders: `LlamaConfig(**TINY)`.

The vocabulary is odd, and nothing ends a greedy sequence early.
"""

NORM_SPREAD = 0.2
BIAS_SPREAD = 0.2


def make_checkpoint(
    path: str | Path,
    config: Any,
    *,
    seed: int = 0,
    gain: float = 1.6,
    dtype: str = "float32",
    file_format: Literal["safetensors", "bin"] = "safetensors",
    max_shard_size: str | int = "5GB",
    config_form: Literal["new", "old"] = "new",
    config_updates: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random model of `config`, a transformers config, into the directory `path`; returns it. No tokenizer.

    seed, gain       as in `random_weights`; equal arguments give equal files
    dtype            of the stored weights: the same fp32 values, rounded
    max_shard_size   "20KB" makes several weight files and an index
    config_form      how config.json is spelled: "new" as transformers 5 writes it, "old" as most published files are,
                     with
                     `rope_theta`, `rope_scaling` and `torch_dtype`
    config_updates   keys of config.json to replace or add at the end; a value of None removes the key
    generation       what generation_config.json holds; None: there is no such file
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    random_weights(model, seed=seed, gain=gain)
    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if file_format == "bin":
        _safetensors_to_bin(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        _write_json(path / "generation_config.json", generation)
    _rewrite_config(path / "config.json", config_form, config_updates or {})
    return path


def random_weights(model: torch.nn.Module, *, seed: int = 0, gain: float = 1.6) -> None:
    """Fill all weights of a transformers model in place, so that small mistakes show and greedy sequences stay varied.

    A matrix gets normal(0, gain / sqrt(inputs)), hence the logits a spread of about `gain`, and layers outweigh the
    embedding in the
    residual stream: with tied embeddings and the usual 0.02, the best next token would nearly always be the last one
    again.
    Norms are spread around 1 and biases around 0: a norm or a bias that is left out or misplaced changes the result.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if tensor.data_ptr() in done or not tensor.is_floating_point():
                continue
            done.add(tensor.data_ptr())
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim >= 2:
                value = noise * gain / tensor.shape[-1] ** 0.5
            elif "norm" in name.rsplit(".", 2)[-2]:
                value = 1 + NORM_SPREAD * noise
            else:
                value = BIAS_SPREAD * noise
            tensor.copy_(value)


def old_form(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json as published before transformers 5, from one that transformers 5 wrote."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype", "layer_types")}
    rope = dict(config["rope_parameters"])
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type", "default")
    # Files of that time spell the key "type" for the early kinds and "rope_type" for those that came later.
    old["rope_scaling"] = None if kind == "default" else {"rope_type" if kind == "llama3" else "type": kind, **rope}
    old["torch_dtype"] = config["dtype"]
    old["transformers_version"] = "4.44.0"
    return old


def _rewrite_config(file: Path, form: str, updates: Mapping[str, Any]) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    if form == "old":
        config = old_form(config)
    config.update(updates)
    removed = [key for key, value in updates.items() if value is None]
    _write_json(file, {key: value for key, value in config.items() if key not in removed})


def _safetensors_to_bin(path: Path) -> None:
    """Replace the weight files and their index by what `torch.save` made of them in its time."""
    import torch
    from safetensors.torch import load_file

    def renamed(name: str) -> str:
        return name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin", 1)

    for file in sorted(path.glob("*.safetensors")):
        torch.save(load_file(file), path / renamed(file.name))
        file.unlink()
    index = path / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"] = {name: renamed(shard) for name, shard in content["weight_map"].items()}
        _write_json(path / renamed(index.name), content)
        index.unlink()


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(dict(content), indent=2, sort_keys=True) + "\n", encoding="utf-8")
