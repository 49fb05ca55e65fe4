"""Text in and out: tokenizer, chat template, incremental detokenising. The engine itself knows only token ids."""

from rapid_infer.text.detokenizer import Detokenizer
from rapid_infer.text.grammar import GrammarCompiler
from rapid_infer.text.stop import StopStrings
from rapid_infer.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "GrammarCompiler", "StopStrings", "Tokenizer"]
