"""A new plugin package: a small decoder that installs, is found and passes the conformance suite as it stands."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

from rapid_infer.errors import ConfigError
from rapid_infer.registry import ModelRegistry
from rapid_infer.version import __version__

NORM = '        self.{0} = ri.RMSNorm(ctx.sub("{0}"), dim, config.rms_norm_eps)\n'
ARGUMENTS = 'ctx.sub("attn"), mine, kv, dim, rope=config.rope'
LIKE: dict[str, dict[str, str]] = {
    "llama": {"norms": "", "arguments": ARGUMENTS},
    "qwen3": {
        "norms": NORM.format("q_norm") + NORM.format("k_norm"),
        "arguments": f"\n            {ARGUMENTS}, q_norm=self.q_norm, k_norm=self.k_norm\n        ",
    },
}
"""What the templates need of each model of transformers that a plugin may start from."""

FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "test_conformance.py": "tests/test_conformance.py",
    "model.py": "src/{package}/model.py",
    "conformance.py": "src/{package}/conformance.py",
}


def write(name: str, like: str = "llama", architecture: str | None = None, parent: Path | None = None) -> Path:
    """Makes the folder `rapid-infer-NAME` in `parent`, else in the working directory, and returns it.

    `architecture`: what config.json calls the model, "Tiny2ForCausalLM" for the name tiny2 unless given. ConfigError
    for names that no package can have, an architecture that is installed already, and a folder that exists.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise ConfigError(f"plugin name {name!r}: expected lower-case letters, digits and dashes, such as my-model")
    if like not in LIKE:
        raise ConfigError(f"like={like!r}: expected one of {', '.join(LIKE)}")
    words = re.split("[-_]", name)
    architecture = architecture or "".join(word.capitalize() for word in words) + "ForCausalLM"
    if not architecture.isidentifier():
        raise ConfigError(f"architecture {architecture!r}: expected a class name such as LlamaForCausalLM")
    if taken := ModelRegistry.candidates(architecture):
        raise ConfigError(
            f"architecture {architecture!r} is already served by {taken[0].origin}; choose another NAME, or "
            "--architecture"
        )
    distribution = f"rapid-infer-{'-'.join(words)}"
    folder = (parent or Path()) / distribution
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another NAME, or remove it")
    major, minor, *_ = __version__.split(".")
    package = distribution.replace("-", "_")
    values = {
        **LIKE[like],
        "like": like,
        "architecture": architecture,
        "distribution": distribution,
        "package": package,
        "version": f"{major}.{minor}",
        "next_version": f"{major}.{int(minor) + 1}",
    }
    templates = files(__name__)
    for template, target in FILES.items():
        file = folder / target.format(package=package)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = Template((templates / f"{template}.tmpl").read_text(encoding="utf-8"))
        file.write_text(text.substitute(values), encoding="utf-8")
    (folder / "src" / package / "__init__.py").write_text(f'"""{architecture} for rapid_infer."""\n', encoding="utf-8")
    return folder
