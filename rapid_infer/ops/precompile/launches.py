"""Which Triton kernels a run would launch, found without launching any.

Inside `collect_launches` tensors may lie on "meta": a kernel is compiled for the types of its arguments and for whether
addresses and integers are multiples of 16, not for their values.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction, KernelParam, MockTensor

_RUN = JITFunction.run


@dataclass(frozen=True)
class Launch:
    """One kernel for one kind of arguments; those hold no tensor."""

    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.fn.__module__}.{self.kernel.fn.__name__}"

    @property
    def size(self) -> int:
        """Characters of the kernel and all it calls, which is a guess at how long it takes to compile."""
        return _size(self.kernel)

    def compile(self, claims: Path | None = None) -> str:
        """Put the kernel into Triton's cache unless it is there; returns its folder's name within.

        With `claims`, a folder that is empty at first, also the host's code that launches it, which is linked with the
        driver's library: the same for all kernels with such parameters, so that one of the processes makes it.
        """
        compiled: Any = _RUN(self.kernel, *self.args, grid=(1,), warmup=True, **self.kwargs)
        if claims is not None:
            parameters = repr(
                (list(compiled.src.signature.values()), getattr(compiled.metadata, "tensordesc_meta", None))
            )
            try:
                (claims / hashlib.sha256(parameters.encode()).hexdigest()).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                CudaLauncher(compiled.src, compiled.metadata)
        return get_cache_manager(compiled.hash).key


@contextmanager
def collect_launches(take: Callable[[Launch], object]) -> Iterator[None]:
    """Inside, kernels are given to `take` instead of launched, each once for each kind of arguments."""
    found = set()

    def note(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        params = {param.name: param for param in kernel.params}
        named = {**dict(zip(params, args)), **kwargs}
        key = (kernel, *((name, _kind(named[name], params.get(name))) for name in sorted(named)))
        if key not in found:
            found.add(key)
            options = {name: _without_data(value) for name, value in kwargs.items()}
            take(Launch(kernel, tuple(map(_without_data, args)), options))

    JITFunction.run = note
    try:
        yield
    finally:
        JITFunction.run = _RUN


def _kind(value: Any, param: KernelParam | None) -> Any:
    """What of an argument a kernel may be compiled for, never less than Triton looks at; `param` None: an option."""
    if param is None or param.is_constexpr:
        return repr(value)
    if isinstance(value, Tensor):
        aligned = value.storage_offset() * value.element_size() % 16 == 0
        return value.dtype, param.do_not_specialize or aligned
    if isinstance(value, int) and not isinstance(value, bool):
        return -(1 << 31) <= value < 1 << 31, param.do_not_specialize or (value == 1, value % 16 == 0)
    if isinstance(value, float):
        return float
    if isinstance(base := getattr(value, "base", None), Tensor):
        return type(value), base.dtype, tuple(value.block_shape), repr(getattr(value, "layout", None))
    return repr(value)


class _Address(MockTensor):
    """A tensor of this type, whose address is a multiple of 16 or not."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.dtype, list(tensor.shape))
        self._address = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


def _without_data(value: Any) -> Any:
    return _Address(value) if isinstance(value, Tensor) else value


@cache
def _size(kernel: Any) -> int:
    return sum(len(f.src) for f in _called(kernel, {}).values())


def _called(kernel: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The kernel and all that it calls, by name."""
    name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    if name not in found:
        found[name] = kernel
        names = inspect.getclosurevars(kernel.fn).globals
        for other in names.values():
            if hasattr(other, "fn") and hasattr(other, "src"):
                _called(other, found)
    return found
