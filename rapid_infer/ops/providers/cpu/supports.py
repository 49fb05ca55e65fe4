"""Reasons that several CPU providers share."""

from __future__ import annotations

from rapid_infer.ops.registry import OpInfo


def not_on_cpu(info: OpInfo) -> list[str]:
    return [] if info.device == "cpu" else [f"runs on cpu, not {info.device}"]
