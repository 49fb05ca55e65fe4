"""Arguments and results of an operator's calls, such that one call cannot change what another one finds."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from rapid_infer.ops import OPS
from rapid_infer.ops.registry import Provider


def fresh(kwargs: dict[str, Any]) -> dict[str, Any]:
    """With metadata that no provider has derived anything from; the tensors are the same."""

    def renewed(value: Any) -> Any:
        return dataclasses.replace(value, plans={}) if hasattr(value, "plans") else value

    return {name: renewed(value) for name, value in kwargs.items()}


def clone(kwargs: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """With copies of the named tensors."""
    return {
        name: value.clone() if name in names and isinstance(value, Tensor) else value for name, value in kwargs.items()
    }


def restore(arguments: dict[str, Any], original: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        arguments[name].copy_(original[name])


def prepared(provider: Provider, kwargs: dict[str, Any]) -> dict[str, Any]:
    name = OPS[provider.op].prepared
    if provider.prepare is None or name is None:
        return kwargs
    return {**kwargs, name: provider.prepare(kwargs[name])}


def outputs(fn: Any, kwargs: dict[str, Any], mutates: tuple[str, ...]) -> tuple[Any, ...]:
    """What a call returns and what it writes, of inputs of its own: a provider may reuse any buffer."""
    own = clone(fresh(kwargs), tuple(kwargs))
    result = fn(**own)
    returned = result if isinstance(result, tuple) else () if result is None else (result,)
    return (*returned, *(own[name] for name in mutates))
