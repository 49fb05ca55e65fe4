"""CUDA graphs acted out on a CPU: what a run launches is noted, and launched again on the same tensors.

As a real one does, a graph keeps to the tensors and numbers it was recorded with, recording executes nothing, and
reading a value on the host while recording is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rapid_infer.ops.registry import OPS, BoundOp, OpResolver
from rapid_infer.worker.graph_recorder import capture_failure

T = TypeVar("T")
READS = ("tolist", "numpy", "__array__", "cpu")
"""Methods of tensors that wait for the device without being an operator; those that are one have a tag that says it."""
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}


def _reads(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator waits for values on the device, in order to return one or to know a shape."""
    if func in INDEXES:  # only by a mask: how many it takes is not known
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return bool(WAITS & set(func.tags)) or func is torch.ops.aten.is_nonzero.default


def _refuse(what: object) -> RuntimeError:
    return RuntimeError(f"operation not permitted when stream is capturing: {what} reads values on the host")


class _Reading(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            raise _refuse(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class ActedGraph:
    def __init__(self) -> None:
        self.launches: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any], Any]] = []

    def replay(self) -> None:
        for fn, args, kwargs, recorded in self.launches:
            for old, new in zip(tree_leaves(recorded), tree_leaves(fn(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class _Recording(TorchDispatchMode):
    """Notes operators of torch one by one, and an operator of ours as one; `before` is what they have overwritten."""

    def __init__(self, graph: ActedGraph) -> None:
        super().__init__()
        self.graph = graph
        self.before: list[tuple[Tensor, Tensor]] = []

    def note(self, fn: Callable[..., T], args: Sequence[Any], kwargs: dict[str, Any], written: list[Any]) -> T:
        self.before += [(tensor, tensor.clone()) for tensor in written if isinstance(tensor, Tensor)]
        result = fn(*args, **kwargs)
        self.graph.launches.append((fn, args, kwargs, result))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _reads(func, args):
            raise _refuse(func)
        kwargs = kwargs or {}
        given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        writes = (a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        return self.note(func, args, kwargs, [given.get(name) for name in writes])

    @contextmanager
    def ops_as_one(self) -> Iterator[None]:
        launch = BoundOp.__call__

        def call(bound: BoundOp, *args: Any, **kwargs: Any) -> Any:
            op = OPS[bound.op]
            given = inspect.signature(op.reference).bind(*args, **kwargs).arguments
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return self.note(bound.fn, args, kwargs, [given[name] for name in op.mutates])

        with patch.object(BoundOp, "__call__", call):
            yield
        assert BoundOp.__call__ is launch


class ActingRecorder:
    """In place of GraphRecorder."""

    def record(
        self, what: str, run: Callable[[], T], warm_up: Callable[[], object] | None = None
    ) -> tuple[ActedGraph, T]:
        recording = _Recording(ActedGraph())
        try:
            (warm_up or run)()
            with recording.ops_as_one(), _Reading(), recording:
                result = run()
        except Exception as error:
            raise capture_failure(what, error, OpResolver("cpu")) from error
        finally:
            for tensor, value in reversed(recording.before):
                tensor.copy_(value)
        return recording.graph, result

    def release_unused(self) -> None: ...
