"""One GGUF file of a Llama model into a normal checkpoint directory.

Knows what the demo model needs (architecture `llama`, byte-level BPE) and refuses everything else, so that no file is
converted into a model that only looks right. Works in numpy alone; one tensor is in memory at a time.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rapid_infer.errors import HubError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import AddedToken, Tokenizer

Shape = tuple[int, ...]
Advance = Callable[[int, int], None]

_CONTROL_TOKEN, _USER_TOKEN = 3, 4
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a Llama model as its GGUF metadata gives them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    rope_theta: float
    rms_eps: float
    tied: bool

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


def convert_gguf(source: Path, target: Path, advance: Advance | None = None) -> None:
    """Write the model in `source` into the existing directory `target` as a Hugging Face checkpoint in bfloat16.

    Writes config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and, when
    the file has one, chat_template.jinja. `advance(done, total)` is called after each tensor. Raises HubError when
    the file is damaged or is not a model this converter knows, OSError when `target` cannot be written.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise HubError(
            f"{source}: cannot be read as GGUF ({error}); expected a complete GGUF file; fetch it again"
        ) from error
    shape = read_shape(reader, source)
    tensors = _matched_tensors(reader, shape, source)
    _write_json(target / "config.json", model_config(shape, reader))
    _write_json(target / "generation_config.json", _token_ids(reader))
    write_tokenizer(reader, shape, source, target)
    _write_weights(target / "model.safetensors", tensors, shape, advance)


def read_shape(reader: "GGUFReader", source: Path) -> LlamaShape:
    """Read the sizes of a Llama model; HubError when a field is missing or says another architecture."""
    architecture = _field(reader, "general.architecture", source)
    if architecture != "llama":
        raise _unsupported(source, f"architecture '{architecture}'", "'llama'")
    values = {
        key: _field(reader, f"llama.{field}", source)
        for key, field in {
            "layers": "block_count",
            "hidden": "embedding_length",
            "intermediate": "feed_forward_length",
            "heads": "attention.head_count",
            "kv_heads": "attention.head_count_kv",
            "context": "context_length",
            "rope_theta": "rope.freq_base",
            "rms_eps": "attention.layer_norm_rms_epsilon",
        }.items()
    }
    for key in ("rope_theta", "rms_eps"):
        values[key] = _shortest_float(values[key])
    vocab = len(_field(reader, "tokenizer.ggml.tokens", source))
    shape = LlamaShape(vocab=vocab, tied="output.weight" not in {t.name for t in reader.tensors}, **values)
    rotary = _field(reader, "llama.rope.dimension_count", source)
    if shape.hidden % shape.heads or rotary != shape.head_dim:
        raise _unsupported(source, f"{rotary} rotary dimensions", f"{shape.hidden} / {shape.heads} of them")
    return shape


def model_config(shape: LlamaShape, reader: "GGUFReader") -> dict[str, Any]:
    """Return config.json of the converted model, with the plain fields that readers old and new understand."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": shape.rms_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocab,
        **_token_ids(reader),
    }


def tensor_shapes(shape: LlamaShape) -> dict[str, tuple[str, Shape]]:
    """Return, for every tensor the GGUF file must hold, its name in the checkpoint and its shape."""
    hidden, ffn, kv = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_dim
    sizes: dict[str, Shape] = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    result: dict[str, tuple[str, Shape]] = {}
    for name, converted in _TOP_NAMES.items():
        if name != "output.weight" or not shape.tied:
            result[name] = (converted, (hidden,) if "norm" in name else (shape.vocab, hidden))
    for layer in range(shape.layers):
        for part, converted in _BLOCK_NAMES.items():
            result[f"blk.{layer}.{part}.weight"] = (f"model.layers.{layer}.{converted}.weight", sizes[part])
    return result


def undo_rope_order(weight: "np.ndarray", heads: int) -> "np.ndarray":
    """Give the rows of a query or key weight back their order: GGUF interleaves the two rotary halves of each head."""
    rows = weight.shape[0]
    return weight.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows, -1)


def write_tokenizer(reader: "GGUFReader", shape: LlamaShape, source: Path, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; HubError for an unknown tokenizer kind."""
    kind = (_field(reader, "tokenizer.ggml.model", source), _field(reader, "tokenizer.ggml.pre", source))
    if kind != ("gpt2", "smollm"):
        raise _unsupported(source, f"tokenizer {kind}", "('gpt2', 'smollm')")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens", source)
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type", source)
    merges: list[tuple[str, str]] = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges", source)]
    added = _added_tokens(tokens, kinds)
    _build_tokenizer(tokens, merges, list(added.values())).save(str(target / "tokenizer.json"), pretty=True)
    _write_json(target / "tokenizer_config.json", _tokenizer_config(reader, shape, tokens, added))
    template = reader.get_field("tokenizer.chat_template")
    if template is not None:
        (target / "chat_template.jinja").write_text(template.contents(), encoding="utf-8")


def _added_tokens(tokens: list[str], kinds: list[int]) -> dict[int, "AddedToken"]:
    from tokenizers import AddedToken

    return {
        index: AddedToken(tokens[index], special=kind == _CONTROL_TOKEN, normalized=False)
        for index, kind in enumerate(kinds)
        if kind in (_CONTROL_TOKEN, _USER_TOKEN)
    }


def _build_tokenizer(tokens: list[str], merges: list[tuple[str, str]], added: list["AddedToken"]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    # Tokens already in the vocabulary keep their index; this only marks them as special.
    tokenizer.add_tokens(added)
    return tokenizer


def _tokenizer_config(
    reader: "GGUFReader", shape: LlamaShape, tokens: list[str], added: dict[int, "AddedToken"]
) -> dict[str, Any]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}
    fields = {role: reader.get_field(f"tokenizer.ggml.{name}") for role, name in names.items()}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {
                "content": token.content,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token.special,
            }
            for index, token in added.items()
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.context,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": tokens[field.contents()] for role, field in fields.items() if field is not None},
    }


def _matched_tensors(reader: "GGUFReader", shape: LlamaShape, source: Path) -> dict[str, "ReaderTensor"]:
    """Return the file's tensors by name, each one known and of the right shape and none missing."""
    found = {tensor.name: tensor for tensor in reader.tensors}
    expected = tensor_shapes(shape)
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unknown:
        raise _unsupported(source, f"tensors {unknown[:3]} and not {missing[:3]}", "a Llama's")
    for name, tensor in found.items():
        # GGUF counts dimensions from the innermost one.
        actual = tuple(int(size) for size in reversed(tensor.shape))
        if actual != expected[name][1]:
            raise _unsupported(source, f"{name} of shape {actual}", f"shape {expected[name][1]}")
    return found


def _write_weights(
    path: Path, tensors: dict[str, "ReaderTensor"], shape: LlamaShape, advance: Advance | None = None
) -> None:
    """Write model.safetensors tensor by tensor: the format is an index in JSON and then the raw values."""
    expected = tensor_shapes(shape)
    index: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for converted, size in expected.values():
        end = offset + 2 * math.prod(size)
        index[converted] = {"dtype": "BF16", "shape": list(size), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(index, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for done, values in enumerate(_bf16_values(expected, tensors, shape), 1):
            file.write(values)
            if advance is not None:
                advance(done, len(expected))


def _bf16_values(
    expected: dict[str, tuple[str, Shape]], tensors: dict[str, "ReaderTensor"], shape: LlamaShape
) -> Iterator[memoryview]:
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    for name in expected:
        weight = dequantize(tensors[name].data, tensors[name].tensor_type).astype(np.float32, copy=False)
        if name.endswith("attn_q.weight"):
            weight = undo_rope_order(weight, shape.heads)
        elif name.endswith("attn_k.weight"):
            weight = undo_rope_order(weight, shape.kv_heads)
        yield np.ascontiguousarray(quantize(weight, GGMLQuantizationType.BF16)).data


def _token_ids(reader: "GGUFReader") -> dict[str, int]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    fields = {key: reader.get_field(f"tokenizer.ggml.{name}") for key, name in names.items()}
    return {key: int(field.contents()) for key, field in fields.items() if field is not None}


def _field(reader: "GGUFReader", name: str, source: Path) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise _unsupported(source, f"no field '{name}'", "a complete Llama file")
    return field.contents()


def _shortest_float(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 and not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


def _unsupported(source: Path, got: str, expected: str) -> HubError:
    return HubError(f"{source}: got {got}; expected {expected}; this converter reads the demo model's file only")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
