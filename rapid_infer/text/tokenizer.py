"""A model's tokenizer and chat template, by transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from rapid_infer.errors import ConfigError, RequestError
from rapid_infer.fields import check_text
from rapid_infer.models.checkpoint import read_checkpoint
from rapid_infer.params import SamplingParams
from rapid_infer.text.chat_template import render, template_names, template_text
from rapid_infer.text.detokenizer import Detokenizer, adds_the_same_everywhere
from rapid_infer.text.grammar import GrammarCompiler, is_tag

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def _config(path: Path) -> Any:
    """What transformers chooses the tokenizer's class by. A config.json that is wrong is for the engine to refuse."""
    from transformers import PreTrainedConfig

    try:
        return read_checkpoint(path).hf_config
    except ConfigError:
        return PreTrainedConfig()


def _has_any(path: Path, names: Iterable[str]) -> bool:
    return any((path / name).is_file() for name in names)


def _unusable(path: Path, why: str) -> ConfigError:
    if "trust_remote_code" in why:
        why = (
            "tokenizer_config.json has auto_map, code in the checkpoint, which is never run; expected a tokenizer "
            "class of transformers"
        )
    elif not _has_any(path, VOCABULARIES):
        why = f"found none of {', '.join(VOCABULARIES)}"
    elif not _has_any(path, ["tokenizer.json", "vocab.json"]):
        why = (
            f"tokenizer.model alone, a SentencePiece file, cannot be read here ({why}); `pip install sentencepiece` "
            "lets transformers convert it"
        )
    return ConfigError(
        f"no usable tokenizer in {path}: {why}; add tokenizer.json and tokenizer_config.json, or pass "
        "skip_tokenizer_init=True and give token ids"
    )


class Tokenizer:
    """Loads the tokenizer files of a model directory. ConfigError when they are absent or broken."""

    def __init__(self, path: Path | str) -> None:
        from transformers import AutoTokenizer

        path = Path(path)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, config=_config(path), trust_remote_code=False)
        except Exception as error:
            raise _unusable(path, " ".join(str(error).split())) from error
        if not _has_any(path, {*VOCABULARIES, *self._tokenizer.vocab_files_names.values()}):
            # Some classes make an empty tokenizer of nothing.
            raise _unusable(path, f"{type(self._tokenizer).__name__} found no vocabulary")
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            raise _unusable(path, f"{type(self._tokenizer).__name__} is not made by the tokenizers library")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Its end-of-sequence token, if it has one: what chat templates end a turn with."""
        token = self._tokenizer.eos_token_id
        return () if token is None else (token,)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with whatever the tokenizer itself puts before it: one BOS, for models that have one."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, for each of them; many at once take all cores."""
        if not texts:
            return []
        bos = self._tokenizer.bos_token_id
        # A prompt that was rendered by a template brings its own BOS.
        return [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in self._ids(texts)]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of a conversation through the model's chat template; `options` are those of `LLM.encode_chat`."""
        return self.encode_rendered(self.render_chat(messages, **options))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text that `encode_chat` encodes."""
        return render(self._tokenizer, messages, **options)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a text that brings all its special tokens along."""
        return self._ids([text], add_special_tokens=False)[0]

    def template_names(self) -> frozenset[str]:
        """What the chat template reads beside the messages; none without a template. RequestError if it is broken."""
        return template_names(self._tokenizer)

    @property
    def chat_template(self) -> str:
        """Empty without one; of several, the one for tools."""
        return template_text(self._tokenizer)

    def _ids(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        try:
            return list(map(list, self._tokenizer(list(texts), **options)["input_ids"]))
        except Exception:
            for text in texts:
                check_text("the prompt", text, RequestError)
            raise

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """What one token adds to a text, with the space it begins with; special tokens are shown."""
        before, ids = self._word
        text = self._backend.decode([*ids, token_id], skip_special_tokens=False)
        if text.startswith(before):
            return text[len(before) :]
        return self._backend.decode([token_id], skip_special_tokens=False)

    def special_stops(self, params: SamplingParams) -> dict[int, str]:
        """Stop strings that are special tokens, by id: where those are left out, no text ever has them."""
        if not params.skip_special_tokens:
            return {}
        return {self.special_tokens[text]: text for text in params.stop if text in self.special_tokens}

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the tokens that `skip_special_tokens` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @cached_property
    def tag_tokens(self) -> dict[str, int]:
        """Text -> id of the tokens that a grammar must name by id."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if is_tag(token.content, token.special)}

    @cached_property
    def _word(self) -> tuple[str, list[int]]:
        """Any word and its ids: SentencePiece drops the space of what has nothing before it."""
        ids = self._backend.encode("a", add_special_tokens=False).ids
        return self._backend.decode(ids, skip_special_tokens=False), ids

    @cached_property
    def _texts(self) -> dict[bool, dict[int, str]] | None:
        """For `Detokenizer`, by whether special tokens are left out."""
        return {True: {}, False: {}} if adds_the_same_everywhere(self._backend) else None

    def grammars(self, vocab_size: int, stop_token_ids: Sequence[int]) -> GrammarCompiler:
        """RequestError without llguidance, and for a tokenizer that it cannot use. Takes about a second."""
        backend = copy(self._backend)
        backend.no_padding()
        backend.no_truncation()
        return GrammarCompiler(backend.to_str(), vocab_size, stop_token_ids)

    @property
    def _backend(self) -> Any:
        return self._tokenizer.backend_tokenizer

    def detokenizer(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh stream decoder for what follows the prompt."""
        texts = None if self._texts is None else self._texts[skip_special_tokens]
        return Detokenizer(self._backend, prompt_token_ids, skip_special_tokens=skip_special_tokens, texts=texts)
