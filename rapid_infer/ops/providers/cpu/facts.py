"""Reasons that several CPU providers share."""

from __future__ import annotations

from rapid_infer.ops.registry import OpFacts


def not_on_cpu(facts: OpFacts) -> list[str]:
    return [] if facts.device == "cpu" else [f"runs on cpu, not {facts.device}"]
