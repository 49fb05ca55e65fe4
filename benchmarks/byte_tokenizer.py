"""A tokenizer of any vocabulary for models with random weights: any id decodes to text, and any text encodes.

`python benchmarks/byte_tokenizer.py MODEL_DIR` writes one into a folder, of the size that its config.json says.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own that are text nevertheless, as in Qwen3's tokenizer."""

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{%- for tool in tools %}{{ tool | tojson }}\n{% endfor -%}"
    "<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif -%}{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ '<tool_call>' }}{{ call.function | tojson }}{{ '</tool_call>' }}"
    "{% endfor -%}{{ '<|im_end|>\\n' }}{% endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}"
    "{% endif -%}"
)


def _words() -> Iterator[str]:
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    for length in itertools.count(2):
        for word in itertools.product(letters, repeat=length):
            yield "\u0120" + "".join(word)


def write_tokenizer(folder: Path, vocab_size: int, template: str = TEMPLATE, tags: Sequence[str] = TAGS) -> None:
    """Bytes, words, `tags`, and the special tokens last. ValueError when the vocabulary has no room for them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: at for at, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    room = vocab_size - len(SPECIAL) - len(tags)
    if room < len(vocab):
        raise ValueError(f"a vocabulary of {vocab_size} has no room for all bytes")
    words = _words()
    while len(vocab) < room:
        vocab.setdefault(next(words), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    write_tokenizer(where, json.loads((where / "config.json").read_text(encoding="utf-8"))["vocab_size"])
