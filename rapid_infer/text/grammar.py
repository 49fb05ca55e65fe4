"""Output in a given form: grammars of llguidance as masks of tokens, which follow what has been generated."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rapid_infer.errors import RequestError
from rapid_infer.params import FORMS

_KEPT = 64
"""Compiled grammars that are kept for later requests."""

_FUEL = 4_000_000
"""Work that a grammar may take to compile, about a tenth of a second."""


class GrammarCompiler:
    """For one model. `tokenizer` is the JSON of a `tokenizers.Tokenizer`; may be used by several threads."""

    def __init__(self, tokenizer: str, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs llguidance, which is not installed: pip install 'rapid-infer[serve]'"
            ) from error
        self._library = llguidance
        self._vocab_size = vocab_size
        stops = list(stop_token_ids)
        if not stops:
            raise RequestError(
                "structured_outputs needs a token that ends the text, and neither model nor tokenizer names one"
            )
        tokenizer = _without_tags(tokenizer)
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=stops)
        except Exception as error:
            raise RequestError(f"structured_outputs: llguidance cannot use this model's tokenizer: {error}") from error
        self._limits = llguidance.LLParserLimits(initial_lexer_fuel=_FUEL, verbose_errors=False)
        self._matchers: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: Mapping[str, Any]) -> GrammarMask:
        """A mask for one completion. RequestError, which says what, for a schema or an expression that is none."""
        grammar = self._grammar(spec)
        with self._lock:
            matcher = self._matchers.pop(grammar, None)
        if matcher is None:
            matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            if matcher.is_error():
                kind = next(kind for kind in FORMS if kind in spec)
                raise RequestError(f"structured_outputs: this {kind} cannot be used: {matcher.get_error():.300}")
            if self._says_nothing(matcher):
                raise RequestError("structured_outputs: no text has this form; a schema that only refers to itself?")
        with self._lock:
            self._matchers[grammar] = matcher
            if len(self._matchers) > _KEPT:
                self._matchers.popitem(last=False)
            own = matcher.deep_copy()
        return GrammarMask(own, self._vocab_size, spec.get("after"), spec.get("opens"))

    def _says_nothing(self, matcher: Any) -> bool:
        """Whether nothing but the end may come, and the empty text will not do."""
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed[self._tokenizer.eos_tokens] = 0
        return not allowed.any() and not matcher.is_accepting()

    def _grammar(self, spec: Mapping[str, Any]) -> str:
        make = self._library.LLMatcher
        try:
            if spec.get("json_object"):
                return make.grammar_from_json_schema({"type": "object"})
            if "json" in spec:
                return make.grammar_from_json_schema(spec["json"])
            if "regex" in spec:
                return make.grammar_from_regex(spec["regex"])
            if "choice" in spec:
                choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in spec["choice"])
                return make.grammar_from_lark(f"start: {choices}")
            return make.grammar_from_lark(spec["grammar"])
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"structured_outputs: {error!s:.300}") from error


def is_tag(content: str, special: bool) -> bool:
    """Whether an added token is one that llguidance holds to be no text, whatever the tokenizer says."""
    return special or (content.startswith("<") and content.endswith(">"))


def _without_tags(tokenizer: str) -> str:
    """The same tokenizer, in which no text has the tags.

    Where a text is forced, llguidance takes the tokens that the tokenizer makes of it, and then refuses the tags among
    them. A grammar names them as `<[id]>`.
    """
    content = json.loads(tokenizer)
    new: dict[str, str] = {}
    for token in content.get("added_tokens") or ():
        if is_tag(token["content"], token["special"]):
            new[token["content"]] = f"\ue000{token['id']}\ue001"
            token["content"], token["special"] = new[token["content"]], True
    vocab = content["model"].get("vocab")
    if isinstance(vocab, dict):
        content["model"]["vocab"] = {new.get(text, text): token for text, token in vocab.items()}
    elif isinstance(vocab, list):
        content["model"]["vocab"] = [[new.get(text, text), score] for text, score in vocab]
    return json.dumps(content)


class GrammarMask:
    """Which tokens may come next in one completion.

    after, opens   token ids of tags: the grammar holds after the first occurrence of `after`, and before it everything
                   may be chosen. With `opens`, that is so only when the output begins with it.
    """

    changes = True

    def __init__(self, matcher: Any, vocab_size: int, after: Sequence[int] | None, opens: Sequence[int] | None) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._after, self._opens = list(after or ()), list(opens or ())
        self._taken: int | None = None if self._after else 0

    def bits(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        """`[ceil(vocab / 32)]`, as `TokenMask.bits`. ValueError when the output is not what the mask allowed."""
        if self._taken is None:
            self._taken = self._begin(output_token_ids)
            if self._taken is None:
                return self._everything()
        new = list(output_token_ids[self._taken :])
        self._taken += len(new)
        if new and not self._matcher.consume_tokens(new):
            raise ValueError(self._matcher.get_error() or "the output has left its grammar")
        # The library may add a word.
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: -(-self._vocab_size // 32)]
        if self._opens and not output_token_ids:
            bits = bits.copy()
            bits[self._opens[0] // 32] |= np.int32(np.uint32(1 << self._opens[0] % 32).view(np.int32))
            self._taken = None
        return bits

    def _begin(self, output: Sequence[int]) -> int | None:
        """Where the grammar begins; None while that is not known."""
        if self._opens and (not output or output[0] != self._opens[0]):
            return 0
        tag = self._after
        # Only the end is new: earlier ones have been looked at.
        return len(output) if len(output) >= len(tag) and list(output[-len(tag) :]) == tag else None

    def _everything(self) -> NDArray[np.int32]:
        allowed = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        allowed[: self._vocab_size] = 1
        return np.packbits(allowed, bitorder="little").view(np.int32)
