"""Does a plugin's model class keep the contract (`models/causal_lm.py`)? Looked at once, never in a step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rapid_infer.engine.row_fields import SamplingFeatures
from rapid_infer.engine.step_plan import PromptLogprobsPlan
from rapid_infer.errors import ConfigError, PluginError, RapidInferError
from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.decoder import DecoderModel
from rapid_infer.layers.embedding import LMHead
from rapid_infer.loader.weight_map import WeightMap
from rapid_infer.models.checkpoint import Checkpoint
from rapid_infer.registry import Entry, ModelRegistry, reason
from rapid_infer.worker.memory import largest_step
from rapid_infer.worker.model_runner import ModelRunner

SIZES = ("vocab_size", "max_position_embeddings")
"""What the engine reads of a config."""

WEIGHT_MAP = "a WeightMap"
CALLS = (
    ("read_config", 1, nn.Module, "a static method read_config(hf_config) that returns a frozen dataclass"),
    ("__init__", 3, nn.Module, "__init__(self, config, ctx)"),
    ("forward", 2, nn.Module, "forward(self, batch) that returns hidden states [num_tokens, hidden]"),
)
PARTS = tuple(
    (name, 4, DecoderModel, f"{name}(self, config, ctx, number) that builds a part of a layer")
    for name in ("attention", "feed_forward")
)
"""What is called: name, how many arguments it takes by position, the base whose own does not count, what is expected.
PARTS are those of a `DecoderModel` that leaves its layers to it."""


def check_class(cls: type, entry: Entry) -> None:
    """What can be seen without a checkpoint. PluginError that names all of it."""
    if faults := list(_class_faults(cls)):
        raise _error(entry.name, f"{entry.target} ({entry.origin})", "; ".join(faults))


def _class_faults(cls: type) -> Iterator[str]:
    if not issubclass(cls, nn.Module):
        yield "it is no torch.nn.Module"
        return
    has_parts = issubclass(cls, DecoderModel) and cls.layer is DecoderModel.layer
    for name, arguments, base, expected in CALLS + (PARTS if has_parts else ()):
        own = getattr(cls, name, None)
        yield from _call_fault(name, None if own is getattr(base, name, None) else own, arguments, expected)
    weight_map = inspect.getattr_static(cls, "weight_map", None)
    if weight_map is None:
        yield f"it has no weight_map, expected {WEIGHT_MAP}"
    elif not isinstance(weight_map, (WeightMap, property)):
        yield f"weight_map is of type {type(weight_map).__name__}, expected {WEIGHT_MAP}"


def _call_fault(name: str, function: Any, arguments: int, expected: str) -> Iterator[str]:
    """Unless `function` can be called with that many arguments by position."""
    if function is None:
        yield f"it has no {name}, expected {expected}"
    elif not callable(function):
        yield f"{name} is of type {type(function).__name__}, expected {expected}"
    else:
        try:
            signature = inspect.signature(function)
        except ValueError:  # written in C: nothing is known
            return
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            yield f"it has {name}{signature}, expected {expected}"


def read_config(cls: Any, checkpoint: Checkpoint) -> Any:
    """The plugin's own configuration of a checkpoint.

    PluginError unless the engine can use it, ConfigError for sizes that no model has.
    """
    hf_config = checkpoint.hf_config
    try:
        config = cls.read_config(hf_config)
    except ConfigError as error:
        # A plugin speaks of config.json and does not know where it is.
        raise ConfigError(f"{checkpoint.path}: {error}") from error
    except RapidInferError:
        raise
    except Exception as error:
        text = f"read_config raised {reason(error)}; expected a ConfigError for what a checkpoint lacks"
        raise _error(checkpoint.architecture, _who(cls, checkpoint.architecture), text) from error
    if fault := _config_fault(config):
        raise _error(checkpoint.architecture, _who(cls, checkpoint.architecture), f"read_config returned {fault}")
    for name in SIZES:
        if getattr(config, name) < 1:
            file = checkpoint.path / "config.json"
            raise ConfigError(f"{file}: got {name}={getattr(config, name)}, expected 1 or more")
    return config


def _config_fault(config: object) -> str | None:
    if not is_dataclass(config) or isinstance(config, type):
        return f"{_describe(config)}, expected a frozen dataclass"
    for name in SIZES:
        value = getattr(config, name, None)
        if not isinstance(value, int) or isinstance(value, bool):
            got = f"{name}={value!r}" if hasattr(config, name) else f"no {name}"
            return f"a {type(config).__name__} with {got}, expected an integer"
    return None


def check_model(model: Any, config: Any, architecture: str) -> None:
    """A model just built, and what its first forward returns. PluginError, the latter from that forward."""
    who, head = _who(type(model), architecture), getattr(model, "head", None)
    if not isinstance(head, LMHead):
        raise _error(architecture, who, f"its attribute head is {_describe(head)}, expected an LMHead")
    if head.vocab_size != config.vocab_size:
        fault = f"head has vocab_size={head.vocab_size}, expected {config.vocab_size} as read_config returned"
        raise _error(architecture, who, fault)
    if not isinstance(model.weight_map, WeightMap):
        raise _error(architecture, who, f"weight_map is {_describe(model.weight_map)}, expected {WEIGHT_MAP}")

    def check(module: nn.Module, args: tuple[ForwardBatch, ...], hidden: object) -> None:
        if fault := _hidden_fault(hidden, args[0], head.hidden_size, head.dtype):
            raise _error(architecture, who, fault)
        hook.remove()  # a module with hooks is called the slow way

    hook = model.register_forward_hook(check)


def try_forward(runner: ModelRunner, architecture: str) -> None:
    r"""A forward of two tokens, where a step may have two, in the padding row: what is wrong shows before any request\.

    PluginError for what `check_model` finds, or with the cause attached.
    """
    count = min(2, runner.max_model_len, runner.ring.layout.max_tokens)
    none = np.zeros(0, np.int32)
    plan = replace(
        largest_step(1, count, count),
        rows=np.array([runner.device_rows.padding_row], np.int32),
        sampled=none,
        features=SamplingFeatures(),
        token_lists=None,
        # So that hidden states of both tokens are asked for.
        prompt_logprobs=PromptLogprobsPlan(none, none, 0),
    )
    try:
        runner.launch_forward(plan)
        # The padding row has no tokens.
        runner.device_rows.length.zero_()
    except (RapidInferError, MemoryError):
        raise
    except Exception as error:
        who = _who(type(runner.model), architecture)
        raise PluginError(f"architecture {architecture!r}: {who}: the first forward raised {reason(error)}") from error


def _hidden_fault(hidden: object, batch: ForwardBatch, width: int, dtype: torch.dtype) -> str | None:
    """`width` and `dtype` are what the head takes."""
    tokens = batch.num_tokens
    asked = tokens if batch.logits_indices is None else len(batch.logits_indices)
    shapes = ([tokens, width], [asked, width])
    if isinstance(hidden, Tensor) and hidden.dtype == dtype and list(hidden.shape) in shapes:
        return None
    return (
        f"forward returned {_describe(hidden)}, expected hidden states, which the head makes logits of: a Tensor "
        f"[num_tokens, hidden] = [{tokens}, {width}] in {_name(dtype)}"
    )


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a Tensor {list(value.shape)} in {_name(value.dtype)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(_describe, value))}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _who(cls: type, architecture: str) -> str:
    """The class and, if this process can say, the distribution that brings it."""
    package = cls.__module__.partition(".")[0]
    entries = ModelRegistry.candidates(architecture)
    origins = [f" ({entry.origin})" for entry in entries if entry.target.split(":")[0].split(".")[0] == package]
    return f"{cls.__module__}:{cls.__qualname__}{origins[0] if origins else ''}"


def _error(architecture: str, who: str, fault: str) -> PluginError:
    return PluginError(f"architecture {architecture!r}: {who} breaks the plugin contract: {fault}")
