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


def stream(backend: Any, prompt: list[int], ids: list[int], **options: Any) -> str:
    detokenizer = Detokenizer(backend, prompt, **options)
    return "".join(detokenizer.add([token]) for token in ids) + detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_cut_anywhere_is_continued_by_the_characters_it_does_not_have(backend: Any, text: str) -> None:
    ids = backend.encode(text * 2).ids
    for at in range(len(ids) + 1):
        whole = backend.decode(ids[:at]).rstrip("�")
        assert stream(backend, ids[:at], ids[at:]) == (text * 2)[len(whole) :]


def test_a_long_prompt_of_byte_tokens_is_continued(metaspace: Any) -> None:
    text = "汉字é☃👍漢"
    ids = [metaspace.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    for at in range(len(ids) + 1):
        whole = text.encode()[:at].decode(errors="ignore")
        assert stream(metaspace, ids[:at], ids[at:]) == text[len(whole) :]


def test_a_space_between_prompt_and_text_belongs_to_the_text(metaspace: Any) -> None:
    plain, words = (metaspace.token_to_id(word) for word in ("▁plain", "▁words"))
    assert stream(metaspace, [], [plain, words]) == "plain words"
    assert stream(metaspace, [plain], [words]) == " words"
    assert stream(metaspace, [plain] * 20, [words, plain]) == " words plain"


def test_bytes_that_fit_no_character_spoil_neither_the_text_before_nor_after(metaspace: Any) -> None:
    good, broken = "é☃".encode(), [0xE2, 0xFF, 0x98]
    word = metaspace.token_to_id("▁plain")
    rng = random.Random(1)
    for _ in range(50):
        run = [*good, *rng.choices([*broken, 0x41], k=rng.randint(1, 4)), *good[: rng.randint(0, 5)]]
        ids = [word, *(metaspace.token_to_id(f"<0x{byte:02X}>") for byte in run), word]
        shown = stream(metaspace, [], ids)
        assert shown.startswith("plainé☃")
        assert shown.endswith(" plain")
    cut = [metaspace.token_to_id(f"<0x{byte:02X}>") for byte in [*good, 0xE2]]
    assert stream(metaspace, [], cut) == "é☃�"


def test_a_prompt_that_ends_inside_a_character_nobody_finishes(backend: Any) -> None:
    snowman = backend.encode("☃").ids
    assert stream(backend, snowman[:1], []) == ""
    assert stream(backend, snowman[:1], snowman[1:2]) == "�"
    assert stream(backend, snowman[:2], snowman[2:]) == "☃"


def test_special_tokens_are_text_when_asked_for(backend: Any) -> None:
    end = backend.token_to_id("<end>")
    ids = [*backend.encode("a b").ids, end, *backend.encode("c").ids]
    assert stream(backend, [], ids) == "a bc"
    assert stream(backend, [], ids, skip_special_tokens=False) == "a b<end>c"


def test_ids_the_tokenizer_does_not_know_are_no_text(backend: Any) -> None:
    ids = backend.encode("a b").ids
    assert stream(backend, [10**6], [10**6, *ids, 10**6]) == "a b"
