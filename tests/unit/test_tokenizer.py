"""The tokenizer of a model directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from rapid_infer.text import Tokenizer


def make(path: Path) -> Tokenizer:
    """SentencePiece style: a marker is a space but at the beginning, and other characters are bytes."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["</s>", "▁", "▁hi", "hi", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(path)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize(
    ("piece", "text"), [("▁hi", " hi"), ("hi", "hi"), ("▁", " "), ("</s>", "</s>"), ("<0x41>", "A"), ("<0xE2>", "�")]
)
def test_a_token_s_text_has_the_space_it_begins_with(tokenizer: Tokenizer, piece: str, text: str) -> None:
    assert tokenizer.token_text(tokenizer._tokenizer.convert_tokens_to_ids(piece)) == text


def test_the_texts_of_an_answer_s_tokens_are_the_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi hi there")
    assert "".join(map(tokenizer.token_text, ids)) == "hi hi there"
