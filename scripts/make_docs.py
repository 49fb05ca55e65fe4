"""Fills the generated parts of docs/ from the code: `python scripts/make_docs.py`, or `--check` to compare only.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a function below.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from torch import bfloat16

from rapid_infer import SamplingParams
from rapid_infer.cache.spec import KV_CACHE_DTYPES
from rapid_infer.cli.serve import serve
from rapid_infer.config import EngineArgs
from rapid_infer.ops import OPS, OpInfo, load_providers
from rapid_infer.ops.registry import REFERENCE, Provider
from rapid_infer.registry import ModelRegistry
from rapid_infer.server.schema import ChatRequest, CompletionRequest
from rapid_infer.testing.conformance import CHECKS, Case

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
OUR_PLUGINS = ("rapid-infer-deepseek-v2", "rapid-infer-llama", "rapid-infer-qwen3")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def _descriptions(cls: type) -> dict[str, str]:
    """Fields and the aligned descriptions in the class's docstring."""
    described: dict[str, str] = {}
    name = ""
    for line in (cls.__doc__ or "").splitlines():
        if found := re.match(r"    (\w+)\s{2,}(\S.*)", line):
            name, described[found[1]] = found[1], found[2]
        elif name and line.startswith(" " * 8):
            described[name] += " " + line.strip()
        else:
            name = ""
    return described


def _described_fields(cls: type) -> str:
    """Fields, defaults and descriptions."""
    described = _descriptions(cls)
    rows = []
    for field in dataclasses.fields(cls):
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore
        shown = "auto" if default is None and "auto" in described[field.name] else repr(default)
        rows.append((f"`{field.name}`", f"`{shown}`", described[field.name]))
    return table(("name", "default", "meaning"), rows)


def engine_options() -> str:
    return _described_fields(EngineArgs)


def sampling_params() -> str:
    return _described_fields(SamplingParams)


def _ours(provider: Provider) -> bool:
    """Whether it is the runtime's own: what else is installed here does not matter to the page."""
    module = provider.target.partition(":")[0] if isinstance(provider.target, str) else provider.target.__module__
    return module.partition(".")[0] == "rapid_infer"


def operators() -> str:
    load_providers()
    rows = []
    for op in OPS.values():
        providers = sorted(filter(_ours, op.providers.values()), key=lambda p: -p.priority)
        first = (op.__doc__ or "").strip().splitlines()[0]
        rows.append((f"`{op.name}`", ", ".join(f"{p.name} ({p.priority})" for p in providers), first))
    return table(("op", "providers (priority)", "meaning"), rows)


def kv_caches() -> str:
    """Which of our providers take which caches, beside those in the model's type."""
    load_providers()
    rows = []
    for op in (op for op in OPS.values() if "kv_cache_dtype" in op.info):
        for provider in filter(_ours, op.providers.values()):
            if provider.name != REFERENCE:
                infos = (OpInfo("cuda", bfloat16, (9, 0), {"kv_cache_dtype": kind}) for kind in KV_CACHE_DTYPES)
                takes = ("no" if any("KV cache" in why for why in provider.reasons(info)) else "yes" for info in infos)
                rows.append((f"`{op.name}`", provider.name, *takes))
    return table(("op", "provider", *KV_CACHE_DTYPES), rows)


def models() -> str:
    entries = [e for e in ModelRegistry.entries() if e.distribution in OUR_PLUGINS]
    return table(
        ("architecture", "package", "class"), [(f"`{e.name}`", e.distribution, f"`{e.target}`") for e in entries]
    )


def remap(architecture: str) -> str:
    return "```\n" + str(ModelRegistry.resolve(architecture).weight_map) + "\n```\n"  # type: ignore[attr-defined]


def conformance_case() -> str:
    return table(("key", "meaning"), [(f"`{name}`", said) for name, said in _descriptions(Case).items()])


def conformance_checks() -> str:
    return table(("check", "promise"), [(f"`{one.__name__}`", " ".join((one.__doc__ or "").split())) for one in CHECKS])


def request_fields(kind: type) -> str:
    """Of a request over HTTP: what is supported, ignored and refused, from the schema."""
    hints = get_type_hints(kind, include_extras=True)
    rows = []
    for field in msgspec.structs.fields(kind):
        said = next((meta.description for meta in getattr(hints[field.name], "__metadata__", ())), "")
        status = next((word for word in ("ignored", "refused") if said.startswith(word)), "supported")
        meaning = said.removeprefix(status).lstrip(": ")
        rows.append((f"`{field.name}`", "required" if field.required else status, meaning.replace("|", "\\|")))
    return table(("field", "", "meaning"), rows)


def serve_options() -> str:
    rows = []
    for option in inspect.signature(serve).parameters.values():
        shown: Any = option.annotation.__metadata__[0]
        name = shown.param_decls[0] if getattr(shown, "param_decls", None) else f"--{option.name.replace('_', '-')}"
        default = "" if option.default in (None, False) else f"`{option.default}`"
        rows.append(("`MODEL`" if option.name == "model" else f"`{name}`", default, shown.help))
    return table(("option", "default", "meaning"), rows)


def support(name: str) -> str:
    load_providers()  # first: operators are listed in the order in which they are defined
    return table(*getattr(import_module("support_tables"), name)())


PARTS: dict[str, Callable[[], str]] = {
    "engine options": engine_options,
    "sampling params": sampling_params,
    "chat fields": partial(request_fields, ChatRequest),
    "completion fields": partial(request_fields, CompletionRequest),
    "serve options": serve_options,
    "conformance case": conformance_case,
    "conformance checks": conformance_checks,
    "operators": operators,
    "kv caches": kv_caches,
    "models": models,
    "model features": partial(support, "model_features"),
    "op providers": partial(support, "op_providers"),
    "resolved defaults": partial(support, "resolved_defaults"),
    "llama remap": partial(remap, "LlamaForCausalLM"),
    "qwen3 remap": partial(remap, "Qwen3ForCausalLM"),
    "qwen3 moe remap": partial(remap, "Qwen3MoeForCausalLM"),
    "deepseek remap": partial(remap, "DeepseekV2ForCausalLM"),
}


def render(text: str) -> str:
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n{part[3]}", text)


def main() -> None:
    stale = []
    pages = sorted([*ROOT.glob("*/*/README.md"), *(ROOT / "docs").rglob("*.md")])
    for page in [ROOT / "README.md", *pages]:
        old = page.read_text(encoding="utf-8")
        new = render(old)
        if new != old:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python scripts/make_docs.py")


if __name__ == "__main__":
    main()
