"""rapid_infer: a lean LLM inference runtime whose models are pip-installable plugins.

Importing this package imports nothing heavy; the names below load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from rapid_infer.version import __version__

if TYPE_CHECKING:
    from rapid_infer.async_llm import AsyncLLM
    from rapid_infer.llm import LLM
    from rapid_infer.llm_engine import LLMEngine
    from rapid_infer.outputs import CompletionOutput, RequestOutput
    from rapid_infer.params import SamplingParams
    from rapid_infer.registry import ModelRegistry

_EXPORTS = {
    "AsyncLLM": "rapid_infer.async_llm",
    "LLM": "rapid_infer.llm",
    "LLMEngine": "rapid_infer.llm_engine",
    "CompletionOutput": "rapid_infer.outputs",
    "RequestOutput": "rapid_infer.outputs",
    "SamplingParams": "rapid_infer.params",
    "ModelRegistry": "rapid_infer.registry",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LLMEngine",
    "ModelRegistry",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'rapid_infer' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
