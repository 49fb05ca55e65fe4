"""`rapid-infer doctor`: versions, devices, and which operator implementations can run here."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rapid_infer.cli import options
from rapid_infer.cli.tables import console, print_table
from rapid_infer.version import __version__

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "modelscope-hub",
    "numpy",
    "flash-attn",
    "flashinfer-python",
    "vllm",
)


@options.expand(engine_args=("dtype",))
def doctor(*, as_json: options.AsJson = False, engine_args: dict[str, Any]) -> None:
    """Print versions, devices and the operator table: which providers can run here, and why others cannot."""
    report = diagnose(**engine_args)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)


def diagnose(dtype: str = "auto") -> dict[str, Any]:
    """The report as plain data; ConfigError for an unknown dtype.

    `ops`: per op and provider the reasons why it cannot run on the default device.
    """
    import torch

    from rapid_infer import registry
    from rapid_infer.config import DTYPES, EngineArgs
    from rapid_infer.device import probe
    from rapid_infer.ops import OPS, OpInfo, load_providers

    EngineArgs.from_kwargs(dtype=dtype)
    device = probe()
    load_providers()
    name = DTYPES.get(dtype, "bfloat16" if device.bfloat16 else "float32")
    info = OpInfo.of(device.type, getattr(torch, name))
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "rapid_infer": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {package: _version(package) for package in PACKAGES},
        "device": device.type,
        "dtype": name,
        "cpu": {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "bfloat16": probe("cpu").bfloat16},
        "gpus": [{"name": p.name, "capability": f"{p.major}.{p.minor}", "bytes": p.total_memory} for p in gpus],
        "models": registry.ModelRegistry.architectures(),
        "ops": {
            op.name: [
                {"provider": provider, "priority": op.providers[provider].priority, "reasons": list(reasons)}
                for provider, reasons in op.reasons(info).items()
            ]
            for op in OPS.values()
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(report: dict[str, Any]) -> None:
    out = console()
    cpu = report["cpu"]
    fast = "with" if cpu["bfloat16"] else "without"
    gpus = [f"{g['name']} ({g['capability']}, {g['bytes'] / 1024**3:.0f} GiB)" for g in report["gpus"]]
    facts = [
        ("rapid_infer", f"{report['rapid_infer']} on Python {report['python']}, {report['platform']}"),
        ("packages", ", ".join(f"{name} {v}" for name, v in report["packages"].items() if v)),
        ("not installed", ", ".join(name for name, v in report["packages"].items() if not v)),
        ("cpu", f"{cpu['cores']} cores, {cpu['threads']} threads, {fast} fast bfloat16"),
        ("gpus", ", ".join(gpus) or "none"),
        ("default", f"{report['device']} in {report['dtype']}"),
        ("models", ", ".join(report["models"]) or "none: install one, such as rapid-infer-qwen3"),
    ]
    print_table(out, facts)
    rows = []
    for op, providers in report["ops"].items():
        chosen = next((p["provider"] for p in providers if not p["reasons"]), None)
        for row in providers:
            state = "; ".join(row["reasons"]) or ("used" if row["provider"] == chosen else "can run")
            rows.append((op, row["provider"], row["priority"], state))
    print_table(out, rows, columns=["op", "provider", "priority", "here"])
