"""Streamed text equals the whole text, however it is cut and whatever characters it has."""

import random
from typing import Any

import pytest

from rapid_infer.text import Detokenizer
from rapid_infer.text.detokenizer import adds_the_same_everywhere

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
    tokenizer.add_special_tokens(["<end>"])
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
    assert stream(backend, snowman[:1], snowman[1:2]) == ""
    assert stream(backend, snowman[:2], snowman[2:]) == "☃"


def test_special_tokens_are_text_when_asked_for(backend: Any) -> None:
    end = backend.token_to_id("<end>")
    ids = [*backend.encode("a b").ids, end, *backend.encode("c").ids]
    assert stream(backend, [], ids) == "a bc"
    assert stream(backend, [], ids, skip_special_tokens=False) == "a b<end>c"


def test_ids_the_tokenizer_does_not_know_are_no_text(backend: Any) -> None:
    ids = backend.encode("a b").ids
    assert stream(backend, [10**6], [10**6, *ids, 10**6]) == "a b"


def random_ids(backend: Any, rng: random.Random, length: int) -> list[int]:
    """Whole texts, single tokens and bytes of any kind, U+FFFD itself among them."""
    ids: list[int] = []
    while len(ids) < length:
        texts = [*TEXTS, "\ufffd", "a\ufffd ", "\ufffd" * 5]
        piece = backend.encode(rng.choice(texts), add_special_tokens=False).ids
        ids += rng.choice([piece, piece[: rng.randint(0, 5)], rng.choices(range(backend.get_vocab_size()), k=3)])
    return ids


@pytest.mark.parametrize("remember", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_tokens_are_the_text_is_what_they_add_to_the_prompt_s(
    backend: Any, seed: int, remember: bool
) -> None:
    rng = random.Random(seed)
    texts: dict[int, str] | None = {} if remember else None
    for _ in range(30):
        ids = random_ids(backend, rng, rng.randint(1, 60))
        at = rng.randint(0, len(ids))
        whole, prompt = backend.decode(ids), backend.decode(ids[:at])
        # A character whose first bytes end the prompt is text once it is complete.
        wanted = whole[len(prompt if whole.startswith(prompt) else prompt[:-1]) :]
        for cut in (cuts(ids[at:], rng), [[token] for token in ids[at:]], [ids[at:]]):
            detokenizer = Detokenizer(backend, ids[:at], texts=texts)
            assert "".join(map(detokenizer.add, cut)) + detokenizer.flush() == wanted, (ids, at)


@pytest.mark.parametrize("remember", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_a_sentencepiece_style_text_does_not_depend_on_how_it_is_cut(metaspace: Any, seed: int, remember: bool) -> None:
    rng = random.Random(seed)
    texts: dict[int, str] | None = {} if remember else None
    valid = 0
    for _ in range(60):
        ids = random_ids(metaspace, rng, rng.randint(1, 12))
        whole = metaspace.decode(ids)
        shown = set()
        for cut in (cuts(ids, rng), [[token] for token in ids], [ids]):
            detokenizer = Detokenizer(metaspace, texts=texts)
            shown.add("".join(map(detokenizer.add, cut)) + detokenizer.flush())
        (text,) = shown
        if "\ufffd" not in whole:
            valid += 1
            assert text == whole
    assert valid > 10


class Counted:
    """A backend that counts the tokens it is given."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.tokens = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.tokens += len(ids)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", ["backend", "metaspace"])
@pytest.mark.parametrize("kind", ["character", "byte", "cut short", "special", "unknown"])
def test_what_never_becomes_a_character_flows_at_a_constant_cost(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    backend = request.getfixturevalue(name)
    byte = backend.token_to_id("ÿ") if name == "backend" else backend.token_to_id("<0xFF>")
    first = backend.encode("☃", add_special_tokens=False).ids[-3]
    token = {
        "character": backend.encode("\ufffd", add_special_tokens=False).ids,
        "byte": [byte],
        "cut short": [first],
        "special": [backend.token_to_id("<end>")],
        "unknown": [10**6],
    }[kind]
    counted = Counted(backend)
    detokenizer = Detokenizer(counted)
    plain = backend.encode("plain").ids
    detokenizer.add(plain)
    steps, shown = 300, ""
    for n in range(steps):
        counted.tokens = 0
        shown += "".join(detokenizer.add([one]) for one in token)
        assert counted.tokens < 250
        assert kind in ("special", "unknown") or n - shown.count("\ufffd") < 4
    assert (shown + detokenizer.flush()).strip() == backend.decode(token * steps).strip()


@pytest.mark.parametrize("ending", ["�", "�" * 10, "a�", "汉�"])
def test_a_replacement_character_that_ends_the_prompt_is_no_part_of_the_text(
    backend: Any, metaspace: Any, ending: str
) -> None:
    for one in (backend, metaspace):
        prompt, more = (one.encode(text, add_special_tokens=False).ids for text in (ending, "☃ s"))
        assert stream(one, prompt, more).strip() == "☃ s"


def test_a_byte_of_another_run_spoils_nothing(metaspace: Any) -> None:
    broken, good = (
        [metaspace.token_to_id(f"<0x{byte:02X}>") for byte in part] for part in (b"\xe2\xff", "汉é字".encode())
    )
    assert stream(metaspace, [], [*broken, *good]) == "��汉é字"


@pytest.mark.parametrize("ends", [1, 5, 30])
def test_special_tokens_that_are_left_out_change_nothing_around_them(metaspace: Any, backend: Any, ends: int) -> None:
    for one in (metaspace, backend):
        end = [one.token_to_id("<end>")] * ends
        for text in ("a ☃ b", "☃☃", " a"):
            ids = one.encode(text).ids
            spread = [token for pair in zip(ids, [end] * len(ids)) for token in (pair[0], *pair[1])]
            assert stream(one, [], spread) == one.decode(ids)
            assert stream(one, [*ids, *end[:3]], spread) == one.decode(ids + ids)[len(one.decode(ids)) :]


def test_a_character_that_completes_what_was_shown_of_it_is_not_begun_again(backend: Any) -> None:
    literal, stray = backend.encode("�").ids, backend.encode("☃").ids[-1]
    for count in range(1, 6):
        ids = [*literal * count, stray, *literal, *backend.encode("a").ids]
        assert stream(backend, [], ids) == "�" * (count + 2) + "a"


def test_only_decoders_without_memory_have_their_texts_remembered(backend: Any, metaspace: Any) -> None:
    from tokenizers import Tokenizer, decoders, models

    assert adds_the_same_everywhere(backend)
    assert adds_the_same_everywhere(metaspace)
    vocab = {"go</w>": 0, "ab": 1, "out</w>": 2}
    suffixed = Tokenizer(models.BPE(vocab, [], end_of_word_suffix="</w>"))
    for decoder in (decoders.BPEDecoder(), decoders.CTC(), decoders.WordPiece(), None):
        suffixed.decoder = decoder
        assert not adds_the_same_everywhere(suffixed)
    suffixed.decoder = decoders.BPEDecoder()
    assert stream(suffixed, [], [0, 1, 2, 0]) == "go about go"
