"""Streamed text equals the whole text, however it is cut and whatever characters it has."""

import random
from typing import Any

import pytest

from rapid_infer.text import Detokenizer

TEXTS = [
    "plain words, and  two spaces",
    "汉字和かな、한국어",
    "families 👨‍👩‍👧‍👦 flags 🇩🇪 skin 👍🏽 and text",
    "naïve café “quotes” … ½",
    " leading and trailing ",
    "a\n\n\tb",
]


@pytest.fixture(scope="module")
def backend() -> Any:
    """Byte-level BPE with few merges, so that most characters outside ASCII are several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def metaspace() -> Any:
    """As in Llama 2: a marker before each word is a space, but for the first, and unknown bytes are <0x..> tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["▁plain", "▁words", "s", "▁", "<unk>"]
    vocab = {word: i for i, word in enumerate(words + [f"<0x{b:02X}>" for b in range(256)])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def cuts(ids: list[int], rng: random.Random) -> list[list[int]]:
    pieces = []
    while ids:
        n = rng.randint(0, 4)
        pieces.append(ids[:n])
        ids = ids[n:]
    return pieces


@pytest.mark.parametrize("text", TEXTS)
def test_any_cut_adds_up_to_the_whole_text(backend: Any, text: str) -> None:
    ids = backend.encode(text).ids
    assert len(ids) > len(text.encode()) // 4
    for seed in range(20):
        detokenizer = Detokenizer(backend)
        shown = [detokenizer.add(piece) for piece in cuts(ids, random.Random(seed))]
        assert "�" not in "".join(shown)
        assert "".join(shown) + detokenizer.flush() == text


def test_a_character_is_shown_when_its_last_byte_is_there(backend: Any) -> None:
    ids = backend.encode("☃").ids
    assert len(ids) == 3
    detokenizer = Detokenizer(backend)
    assert [detokenizer.add([token]) for token in ids] == ["", "", "☃"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("missing", [1, 2])
def test_a_character_cut_short_shows_at_the_end_only(backend: Any, missing: int) -> None:
    ids = backend.encode("ok ☃").ids[:-missing]
    detokenizer = Detokenizer(backend)
    shown = "".join(detokenizer.add([token]) for token in ids)
    tail = detokenizer.flush()
    assert shown.strip() == "ok"
    assert "�" in tail
    assert shown + tail == backend.decode(ids)
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_do_not_hold_up_what_follows(backend: Any) -> None:
    broken = backend.encode("☃").ids[:2]
    ids = broken + backend.encode("abc").ids
    detokenizer = Detokenizer(backend)
    shown = detokenizer.add(ids)
    assert shown.endswith("abc")
    assert shown + detokenizer.flush() == backend.decode(ids)


def test_special_tokens_are_not_text(backend: Any) -> None:
    end = backend.token_to_id("<end>")
    detokenizer = Detokenizer(backend)
    assert detokenizer.add([*backend.encode("a b").ids, end]) + detokenizer.flush() == "a b"


def test_no_tokens_are_no_text(backend: Any) -> None:
    detokenizer = Detokenizer(backend)
    assert (detokenizer.add([]), detokenizer.flush()) == ("", "")


@pytest.mark.parametrize("words", [["▁plain", "▁words"], ["▁plain", "s", "▁words", "s"], ["▁", "▁words"]])
def test_spaces_of_a_sentencepiece_style_tokenizer(metaspace: Any, words: list[str]) -> None:
    ids = [metaspace.token_to_id(word) for word in words]
    ids += [metaspace.token_to_id(f"<0x{byte:02X}>") for byte in "é☃".encode()]
    for seed in range(10):
        detokenizer = Detokenizer(metaspace)
        shown = "".join(detokenizer.add(piece) for piece in cuts(ids, random.Random(seed)))
        assert shown + detokenizer.flush() == metaspace.decode(ids)
