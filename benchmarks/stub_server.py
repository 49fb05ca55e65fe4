"""`rapid-infer serve` over the stub engine: `python benchmarks/stub_server.py FOLDER [options of serve]`.

FOLDER is made, with a tokenizer and no weights, where it is not there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from byte_tokenizer import write_tokenizer
from stub_engine import VOCAB

from rapid_infer.cli import app
from rapid_infer.ipc.launch import EngineProcess


def make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tokenizer(folder, VOCAB)


def main() -> None:
    folder = Path(sys.argv[1])
    if not (folder / "tokenizer.json").is_file():
        make_folder(folder)
    EngineProcess.module = "stub_engine"
    app.run(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    main()
