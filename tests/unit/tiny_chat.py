"""A tiny random model that can chat: its tokens are the bytes of UTF-8, and nothing but a limit ends an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rapid_infer.cli import app
from rapid_infer.testing.tiny import TINY, make_checkpoint

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
)
Run = Callable[..., tuple[int, str, str]]


def make_chat_model(path: Path, *, template: str | None = TEMPLATE, generation: Mapping[str, Any] | None = None) -> str:
    """Write model and tokenizer into `path`; token 65 is the byte `A`, and so on."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    sizes = {**TINY, "vocab_size": 256, "max_position_embeddings": 8192}
    make_checkpoint(path, Qwen3Config(**sizes, head_dim=16), generation=generation)
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(path)
    return str(path)


def make_run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: arguments to exit code, standard output and standard error."""

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            app.run(list(args))
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call
