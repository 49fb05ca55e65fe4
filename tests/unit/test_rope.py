"""Rotary tables against transformers, from either form of the configuration; and how fields are read."""

import json
from typing import Any

import pytest
import torch

from rapid_infer.errors import ConfigError
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.rope import RopeConfig, rope_table
from rapid_infer.models import ConfigReader
from rapid_infer.ops import OpResolver

HEAD_DIM, POSITIONS = 64, 512
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
FORMS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": YARN,
    "yarn betas": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn factor": {**YARN, "attention_factor": 0.7},
    "yarn mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.4},
}


def context() -> BuildContext:
    return BuildContext(torch.float32, OpResolver("cpu"), POSITIONS)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("theta", [10000.0, 1000000.0])
def test_the_table_equals_that_of_transformers(name: str, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        rope_parameters={**FORMS[name], "rope_theta": theta},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(POSITIONS)[None])
    half = HEAD_DIM // 2
    rope = RopeConfig.read(ConfigReader(config).rope_parameters(), HEAD_DIM, POSITIONS)
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    torch.testing.assert_close(rope_table(context(), rope), expected, atol=1e-5, rtol=0)


def test_one_table_for_equal_settings() -> None:
    ctx, default = context(), RopeConfig(10000.0, 16)
    table = rope_table(ctx, default)
    assert rope_table(ctx.sub("layers.1"), RopeConfig(10000.0, 16)) is table
    assert rope_table(ctx, RopeConfig(10000.0, 16, interleaved=True)) is table
    assert rope_table(ctx, RopeConfig(10000.0, 8)) is not table
    scaled = [rope_table(ctx, RopeConfig(10000.0, 16, "linear", (("factor", factor),))) for factor in (2.0, 4.0)]
    for number, other in enumerate(scaled):
        torch.testing.assert_close(other[:: 2 ** (number + 1)], table[: len(other) // 2 ** (number + 1)])
    assert (table.shape, table.dtype) == ((POSITIONS, 16), torch.float32)


def test_a_partial_rotation_has_a_smaller_table() -> None:
    assert RopeConfig.read({"partial_rotary_factor": 0.25, "rope_theta": 100}, 64, 512).dim == 16


def test_old_and_new_forms_read_the_same() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    none = {"rope_theta": 5e5, "rope_scaling": None}
    read = [RopeConfig.read(ConfigReader(values).rope_parameters(), 64, 512) for values in (old, new, none)]
    assert read[0] == read[1] == RopeConfig(5e5, 64, "linear", (("factor", 2.0),))
    assert read[2] == RopeConfig(5e5, 64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rope_type": "longrope"},
            "rope_type 'longrope' is not supported; expected one of default, linear, llama3, yarn",
        ),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "rope_type 'yarn' needs 'factor', got only"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_type 'llama3' needs 'low_freq_factor'"),
        ({"rope_type": ["yarn"]}, r"rope_type \['yarn'\] is not supported"),
        ({"rope_theta": "10000"}, "rope_theta='10000' among its RoPE parameters: expected a number > 0"),
        ({"rope_theta": None}, "rope_theta=None"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"rope_type": "linear", "factor": None}, "factor=None among its RoPE parameters: expected a number > 0"),
        ({"rope_type": "linear", "factor": "4"}, "factor='4'"),
        ({"rope_type": "linear", "factor": True}, "factor=True"),
        ({"rope_type": "linear", "factor": float("inf")}, "factor=inf"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": None}, "high_freq_factor=N"),
        ({**YARN, "original_max_position_embeddings": "128"}, "original_max_position_embeddings='128'"),
        ({**YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings=None"),
        ({**YARN, "attention_factor": "1"}, "attention_factor='1' among its RoPE parameters: expected a number >= 0"),
        ({**YARN, "beta_fast": [32]}, r"beta_fast=\[32\]"),
        ({**YARN, "truncate": "false"}, "truncate='false' among its RoPE parameters: expected true or false"),
        ({**YARN, "truncate": None}, "truncate=None"),
        ({"partial_rotary_factor": "0.5"}, "partial_rotary_factor='0.5'"),
        ({"partial_rotary_factor": 0.55}, "turn 35 of 64 features"),
        ({"partial_rotary_factor": 1.5}, "turn 96 of 64 features"),
    ],
)
def test_rope_settings_that_are_not_supported(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RopeConfig.read(values, 64, 512)


OLD_YARN = {"type": "yarn", "factor": 4.0}
PLACES: list[tuple[dict[str, Any], int]] = [
    ({}, 512),
    ({"rope_scaling": {"factor": 2.0}}, 512),
    ({"rope_scaling": {"type": "linear", "factor": 4}}, 2048),
    ({"rope_scaling": {"type": "linear", "factor": 2.5, "rope_theta": 7e4}, "rope_theta": 5e4}, 1280),
    ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 4.0}}, 512),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}}, 2048),
    ({"rope_scaling": OLD_YARN}, 2048),
    ({"rope_scaling": {**OLD_YARN, "original_max_position_embeddings": 256}}, 1024),
    ({"rope_scaling": OLD_YARN, "original_max_position_embeddings": 128}, 512),
    ({"rope_scaling": {**YARN, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 256}, 1024),
    ({"rope_scaling": {**YARN, "factor": None}}, 512),
    ({"rope_scaling": {**YARN, "beta_fast": None, "beta_slow": 0, "attention_factor": None, "mscale": None}}, 512),
    ({"rope_scaling": {**FORMS["llama3"]}}, 512),
    ({"rope_scaling": {**FORMS["llama3"]}, "original_max_position_embeddings": 64}, 512),
]


@pytest.mark.parametrize(("settings", "length"), PLACES, ids=[str(settings) for settings, _ in PLACES])
def test_settings_in_every_place_mean_what_they_mean_to_transformers(settings, length, tmp_path) -> None:
    """The table, and the length: the original one times the factor, as vLLM has it; llama3's config says it itself."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 4 * HEAD_DIM, "num_attention_heads": 4, "max_position_embeddings": 512}
    written = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **settings}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(tmp_path)
    rope = RopeConfig.read(ConfigReader(config).rope_parameters(), HEAD_DIM, 512)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(POSITIONS)[None])
    half = HEAD_DIM // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    torch.testing.assert_close(rope_table(context(), rope), expected, atol=1e-5, rtol=0)
    assert rope.context_length(512) == length


READER = ConfigReader({"size": 8, "eps": 1e-5, "tied": True, "act": "silu", "empty": None, "text": "8", "none": 0})


def test_fields_are_read_by_name_and_type() -> None:
    assert (READER.integer("size"), READER.number("eps"), READER.number("size")) == (8, 1e-5, 8.0)
    assert (READER.flag("tied"), READER.text("act"), READER.expect("act", "silu", "swish")) == (True, "silu", "silu")
    assert (READER.integer("empty", 3), READER.integer("absent", 4), READER.optional_integer("empty")) == (3, 4, None)
    assert (READER.optional_integer("size"), READER.size("size"), READER.size("absent", 2)) == (8, 8, 2)
    assert READER.expect("absent", None, 0) is None


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: READER.integer("absent"), "config.json lacks 'absent': expected an integer"),
        (lambda: READER.integer("empty"), "config.json lacks 'empty': expected an integer"),
        (lambda: READER.integer("text"), "config.json has text='8': expected an integer"),
        (lambda: READER.integer("tied"), "config.json has tied=True: expected an integer"),
        (lambda: READER.size("none"), "config.json has none=0: expected an integer >= 1"),
        (lambda: READER.size("text"), "config.json has text='8': expected an integer"),
        (lambda: ConfigReader({"eps": float("nan")}).number("eps"), "has eps=nan: expected a finite number"),
        (lambda: ConfigReader({"rope_scaling": "linear"}).rope_parameters(), "'linear': expected a JSON object"),
        (lambda: READER.number("tied"), "config.json has tied=True: expected a number"),
        (lambda: READER.flag("size"), "config.json has size=8: expected true or false"),
        (lambda: READER.optional_integer("act"), "config.json has act='silu': expected an integer"),
        (lambda: READER.expect("act", "gelu", "relu"), "does not support: expected 'gelu' or 'relu'"),
        (lambda: READER.expect("absent", "gelu", default="silu"), "absent='silu', which this model does not support"),
    ],
)
def test_a_missing_or_wrong_field_is_named(read, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read()


def test_rope_parameters_per_layer_type_are_refused() -> None:
    per_layer = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}
    with pytest.raises(ConfigError, match="per layer type"):
        ConfigReader(per_layer).rope_parameters()
