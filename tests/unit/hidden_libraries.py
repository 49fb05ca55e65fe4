"""A start without one of the libraries that operators come from: `python hidden_libraries.py CHECKPOINT NAME...`.

Prints a line of JSON for each name. Torch and transformers are imported once; each name has a fork of its own, where an
import hook hides the package and its distribution before the runtime is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig


class Without:
    """A finder of `sys.meta_path` that does not find one package."""

    def __init__(self, finder: Any, package: str) -> None:
        self.finder = finder
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] == self.package else self.finder.find_spec(name, path, target)

    def find_distributions(self, *context: Any) -> Iterator[Any]:
        found = getattr(self.finder, "find_distributions", lambda *context: ())(*context)
        return (dist for dist in found if (dist.name or "").replace("-", "_") != self.package)


def start(path: str, package: str) -> dict[str, Any]:
    assert not [name for name in sys.modules if name.partition(".")[0] in ("rapid_infer", package)]
    sys.meta_path[:] = [Without(finder, package) for finder in sys.meta_path]

    from rapid_infer import LLM, SamplingParams
    from rapid_infer.cli.doctor import diagnose
    from rapid_infer.ops import OPS, OpInfo

    report = diagnose()
    llm = LLM(path, device="cpu", dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=1_000_000)
    outputs = llm.generate([[5, 6, 7], [8] * 20], SamplingParams(temperature=0, max_tokens=6))
    llm.close()
    info = OpInfo("cuda", torch.bfloat16, (9, 0))
    return {
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "table": {op: {row["provider"]: row["reasons"] for row in rows} for op, rows in report["ops"].items()},
        "on_gpu": {op.name: {name: list(why) for name, why in op.reasons(info).items()} for op in OPS.values()},
    }


def main() -> None:
    path, *packages = sys.argv[1:]
    AutoConfig.from_pretrained(path)
    for package in packages:
        child = os.fork()
        if not child:
            print(json.dumps(start(path, package)), flush=True)
            os._exit(0)
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"without {package}: exit status {status}")


if __name__ == "__main__":
    main()
