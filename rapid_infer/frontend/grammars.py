"""Masks for requests that want an output of a given form; the compiler is made when the first of them comes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rapid_infer.engine.masks import TokenMask
from rapid_infer.engine.request import Request
from rapid_infer.errors import RequestError
from rapid_infer.frontend.inputs import EngineInfo, possible_stops
from rapid_infer.text import GrammarCompiler, Tokenizer


class Grammars:
    """`tokenizer` gives the model's, None where there is none. May be used by several threads."""

    def __init__(self, info: EngineInfo, tokenizer: Callable[[], Tokenizer | None]) -> None:
        self._info, self._tokenizer = info, tokenizer
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def mask(self, request: Request) -> TokenMask | None:
        """None for a request that does not ask for one. RequestError for a form that cannot be kept."""
        spec = request.params.structured_outputs
        if spec is None:
            return None
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make()
        return self._compiler.compile(spec)

    def _make(self) -> GrammarCompiler:
        tokenizer = self._tokenizer()
        if tokenizer is None:
            raise RequestError("structured_outputs needs the tokenizer, but skip_tokenizer_init=True")
        return tokenizer.grammars(self._info.vocab_size, possible_stops(self._info, tokenizer))
