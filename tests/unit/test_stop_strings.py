"""Stop strings: the same cut however the text arrives, and nothing of them shown."""

import random
from collections.abc import Iterator, Sequence

import pytest

from rapid_infer.text import StopStrings

ALPHABETS = ["ab", "aab\n", "é☃a", "汉字👍🏽", "xyz \n</stop>"]


def first_match(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first stop string to be complete ends, and which it is: the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def cases(seed: int) -> Iterator[tuple[str, list[str], random.Random]]:
    rng = random.Random(seed)
    for _ in range(150):
        alphabet = rng.choice(ALPHABETS)
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 30)))
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 4))]
        yield text, stops, rng


def pieces(text: str, rng: random.Random) -> list[str]:
    cut = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, len(text))))
    return [text[a:b] for a, b in zip([0, *cut], [*cut, len(text)])]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_any_cut_shows_what_the_whole_text_would(seed: int, include: bool) -> None:
    matches = 0
    for text, stops, rng in cases(seed):
        match = first_match(text, stops)
        matches += match is not None
        expected = text if match is None else text[: match[0] - (0 if include else len(match[1]))]
        for cut in ([text], list(text), pieces(text, rng), pieces(text, rng)):
            watcher = StopStrings(stops, include)
            shown = ""
            for piece in cut:
                shown += watcher.push(piece)
                assert expected.startswith(shown), (text, stops, cut)
            assert shown + watcher.flush() == expected, (text, stops, cut)
            assert watcher.matched == (match and match[1])
            assert (watcher.push("more"), watcher.flush()) == ("", "") or match is None
    assert 40 < matches < 150


def test_no_more_is_held_back_than_might_become_a_stop_string() -> None:
    for text, stops, _ in cases(99):
        watcher, shown, so_far = StopStrings(stops), "", ""
        for character in text:
            so_far += character
            shown += watcher.push(character)
            if watcher.matched is None:
                held = so_far[len(shown) :]
                assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["b", "abc"], "xabc", "xa", "b"),
        (["abc", "bc"], "xabcd", "x", "abc"),
        (["bc", "abc"], "xabcd", "x", "abc"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["abab"], "abaabab", "aba", "abab"),
        (["zz", "c"], "abc", "ab", "c"),
    ],
)
def test_of_several_the_first_to_be_complete_then_the_longest(
    stops: list[str], text: str, shown: str, matched: str
) -> None:
    for cut in ([text], list(text)):
        watcher = StopStrings(stops)
        assert ("".join(map(watcher.push, cut)), watcher.matched) == (shown, matched)


def test_a_false_beginning_is_shown_once_it_is_clear() -> None:
    watcher = StopStrings(["\n\nUser:"])
    assert [watcher.push(p) for p in ("a\n", "\n", "Us", "ed", "\n")] == ["a", "", "", "\n\nUsed", ""]
    assert (watcher.flush(), watcher.flush()) == ("\n", "")


def test_what_is_complete_while_not_watched_stays_and_what_only_begins_counts() -> None:
    watcher = StopStrings(["ab", "abcd"])
    assert watcher.push("xab", watch=False) == "x"
    assert (watcher.push("c"), watcher.matched) == ("", None)
    assert (watcher.push("d!"), watcher.matched) == ("", "abcd")
    watcher = StopStrings(["STOP"])
    assert watcher.push("a STOP b ST", watch=False) == "a STOP b "
    assert (watcher.push("OP"), watcher.matched) == ("", "STOP")
    watcher = StopStrings(["ab"])
    assert watcher.push("xab", watch=False) + watcher.push("c") == "xabc"
    assert watcher.matched is None
