"""One registry of operators: a reference that defines each op, and providers with conditions and a priority.

`supports` gives the reasons why a provider *cannot* run; the integer priority says which one *should*. What is
known when a layer is built decides, once; there is no fall-back at run time: a provider that fails, fails loudly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from rapid_infer.device import gpu_info
from rapid_infer.errors import ConfigError, PluginError
from rapid_infer.known_plugins import KNOWN_PROVIDERS
from rapid_infer.registry import EntryPointTable, load_target

OpPriority = tuple[tuple[str, tuple[str, ...]], ...]
"""Per operator, the providers to try, in order."""

REFERENCE = "torch"
OPERATORS = "rapid_infer.ops.facade"
BUILTIN_PROVIDERS = (
    "rapid_infer.ops.providers.cpu",
    "rapid_infer.ops.providers.triton",
    "rapid_infer.ops.providers.grouped_mm",
)


NOT_CAPTURABLE = "waits for the device, which a CUDA graph cannot record: set enforce_eager=True"


@dataclass(frozen=True)
class OpInfo:
    """What is known when a layer is built. `extra` holds what the op itself asks for (head_dim, window, ...).

    cuda_graphs: steps are recorded as CUDA graphs.
    """

    device: str
    dtype: torch.dtype
    capability: tuple[int, int] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    cuda_graphs: bool = False

    @classmethod
    def of(cls, device: torch.device | str, dtype: torch.dtype, *, cuda_graphs: bool = False, **extra: Any) -> OpInfo:
        device = torch.device(device)
        gpu = gpu_info(device)
        kind, capability = (device.type, None) if gpu is None else ("cuda", gpu.capability)
        return cls(kind, dtype, capability, extra, cuda_graphs)


class _DeclaredInfo(dict[str, Any]):
    """`OpInfo.extra`. PluginError for a name that the op does not declare, given by a layer or read by a provider: a
    misspelt one would count as not asked for.
    """

    def __init__(self, op: Op, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._op = op
        for name in given:
            self._check(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._check(name)
        return super().get(name, default)

    def __missing__(self, name: str) -> Any:
        self._check(name)
        raise KeyError(name)

    def _check(self, name: str) -> None:
        if name not in self._op.info:
            near = get_close_matches(name, self._op.info, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            known = ", ".join(self._op.info) or "none"
            raise PluginError(f"op {self._op.name} has no info {name!r}{hint} (it has: {known})")


Supports = Callable[[OpInfo], Sequence[str]]


@dataclass(frozen=True)
class Provider:
    """`target` is the implementation, or its "module:function", imported on first use.

    `prepare` turns the op's prepared argument, a weight, into what the implementation wants to be given. `capturable`:
    a CUDA graph can record it; not if it reads values of tensors on the host, as by `item`, `tolist` or `nonzero`.
    """

    op: str
    name: str
    priority: int
    supports: Supports
    target: Callable[..., Any] | str
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None
    capturable: bool = True

    def reasons(self, info: OpInfo) -> list[str]:
        """Why it cannot run; empty when it can. PluginError for a name that the op does not declare."""
        reasons = list(self.supports(replace(info, extra=_DeclaredInfo(OPS[self.op], info.extra))))
        return [*reasons, NOT_CAPTURABLE] if info.cuda_graphs and not self.capturable else reasons

    @cached_property
    def fn(self) -> Callable[..., Any]:
        """PluginError when the implementation has another signature than the op."""
        fn: Any = load_target(self.target) if isinstance(self.target, str) else self.target
        expected, got = (list(inspect.signature(f).parameters) for f in (OPS[self.op].reference, fn))
        if expected != got:
            raise PluginError(f"provider {self.name!r} of op {self.op} takes {got}, expected {expected}")
        return fn


class BoundOp:
    """The provider chosen for one layer. Calling it runs the provider and counts.

    `prepare` is None when the provider takes weights as they are.
    """

    __slots__ = ("calls", "fn", "op", "prepare", "provider")

    def __init__(self, op: str, provider: Provider) -> None:
        self.op = op
        self.provider = provider.name
        self.fn = provider.fn
        self.prepare = provider.prepare
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"BoundOp({self.op}={self.provider}, calls={self.calls})"


class Op:
    """An operator: `reference` gives signature, meaning and the oracle of the generic test.

    `info` names what a layer may say of itself when it binds the op, beside device and dtype; `mutates` names
    arguments that are written in place, `prepared` a weight that a provider may keep in a layout of its own;
    `capturable` is the reference's, see `Provider`. `cases`, "module:function", is imported by tests alone: a function
    that yields `rapid_infer.testing.op_cases.Case` for a dtype and a device; this package's ops have theirs there.
    """

    def __init__(
        self,
        reference: Callable[..., Any],
        info: tuple[str, ...] = (),
        mutates: tuple[str, ...] = (),
        prepared: str | None = None,
        capturable: bool = True,
        cases: str | None = None,
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.info = info
        self.mutates = mutates
        self.prepared = prepared
        self.cases = cases
        self.providers: dict[str, Provider] = {
            REFERENCE: Provider(self.name, REFERENCE, 0, lambda info: (), reference, capturable=capturable)
        }
        self.__doc__ = reference.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    def reasons(self, info: OpInfo) -> dict[str, Sequence[str]]:
        """Per provider, highest priority first, why it cannot run; empty when it can."""
        ordered = sorted(self.providers.values(), key=lambda p: (-p.priority, p.name))
        return {provider.name: provider.reasons(info) for provider in ordered}

    def bind(self, info: OpInfo, wanted: Sequence[str] = ()) -> BoundOp:
        """The first provider of `wanted`, else the one of highest priority, that can run.

        ConfigError when `wanted` names a provider that does not exist, or when none can run (with each one's reasons).
        """
        reasons = self.reasons(info)
        for name in wanted:
            if name not in reasons:
                package = KNOWN_PROVIDERS.get(name)
                hint = f"; to get it: `pip install {package}`" if package else ""
                raise ConfigError(f"op {self.name} has no provider {name!r}; it has: {', '.join(reasons)}{hint}")
        for name in wanted or reasons:
            if not reasons[name]:
                return BoundOp(self.name, self.providers[name])
        listed = "; ".join(f"{name}: {', '.join(reasons[name])}" for name in wanted or reasons)
        fine = ", ".join(name for name in reasons if not reasons[name])
        raise ConfigError(
            f"no provider of op {self.name}{' in op_priority' if wanted else ''} can run on {info.device} in "
            f"{info.dtype}: {listed}{f'; one of these can: {fine}' if fine else ''}"
        )


OPS: dict[str, Op] = {}


def op(
    *,
    info: tuple[str, ...] = (),
    mutates: tuple[str, ...] = (),
    prepared: str | None = None,
    capturable: bool = True,
    cases: str | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Make the decorated torch function an op; see `Op`. Its signature is the contract of every provider."""

    def define(reference: Callable[..., Any]) -> Op:
        defined = Op(reference, info, mutates, prepared, capturable, cases)
        OPS[defined.name] = defined
        return defined

    return define


def register(
    name: str,
    provider: str,
    *,
    priority: int,
    supports: Supports,
    prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
    capturable: bool = True,
) -> Callable[[Any], Any]:
    """Add the decorated function as a provider of op `name`; see `Provider`.

    PluginError for an unknown op, a name in use or another signature.
    """

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        added = _add(Provider(name, provider, priority, supports, fn, prepare, capturable))
        try:
            return added.fn
        except PluginError:
            del OPS[name].providers[provider]
            raise

    return add


def register_lazy(
    name: str, provider: str, target: str, *, priority: int, supports: Supports, capturable: bool = True
) -> None:
    """Add a provider whose implementation, "module:function", is imported when a layer first binds it.

    PluginError for an unknown op or a name in use; for another signature when it is bound.
    """
    _add(Provider(name, provider, priority, supports, target, capturable=capturable))


def _add(provider: Provider) -> Provider:
    target = OPS.get(provider.op)
    if target is None:
        near = get_close_matches(provider.op, OPS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise PluginError(f"provider {provider.name!r}: no op {provider.op!r}{hint}")
    if provider.prepare is not None and target.prepared is None:
        raise PluginError(f"provider {provider.name!r}: op {provider.op} has no argument that is prepared")
    if provider.name in target.providers:
        raise PluginError(f"op {provider.op} already has a provider {provider.name!r}")
    target.providers[provider.name] = provider
    return provider


_loaded: set[str] = set()


def load_providers() -> None:
    """Import the built-in providers and those that installed packages declare under `rapid_infer.ops`.

    Once per process. PluginError for a package that cannot be imported, or is for another rapid-infer.
    """
    for module in (OPERATORS, *BUILTIN_PROVIDERS):
        import_module(module)
    table = EntryPointTable("rapid_infer.ops", what="operators")
    for entry in table.entries():
        if entry.target not in _loaded:
            table.load(entry)
            _loaded.add(entry.target)


def known_priority(priority: OpPriority) -> OpPriority:
    """Without operators and providers that this process has not registered."""
    known = ((op, OPS[op].providers, names) for op, names in priority if op in OPS)
    return tuple((op, tuple(name for name in names if name in providers)) for op, providers, names in known)


class OpResolver:
    """Binds ops for one model: device, the user's priorities, and a record of what was bound.

    `cuda_graphs`: steps are recorded, so no provider is bound that a graph cannot record.
    """

    def __init__(
        self,
        device: torch.device | str,
        priority: Mapping[str, Sequence[str]] | None = None,
        *,
        cuda_graphs: bool = False,
    ) -> None:
        load_providers()
        self.device = torch.device(device)
        self.priority = dict(priority or {})
        self.cuda_graphs = cuda_graphs
        self.bound: list[BoundOp] = []
        for name in self.priority:
            if name not in OPS:
                near = get_close_matches(name, OPS, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(f"op_priority names an unknown op {name!r}: {hint}Known: {', '.join(OPS)}")

    def bind(self, name: str, dtype: torch.dtype, **extra: Any) -> BoundOp:
        info = OpInfo.of(self.device, dtype, cuda_graphs=self.cuda_graphs, **extra)
        bound = OPS[name].bind(info, self.priority.get(name, ()))
        self.bound.append(bound)
        return bound

    @property
    def pinned(self) -> list[str]:
        """`op=provider` of what was bound by the user's priorities."""
        return list(dict.fromkeys(f"{bound.op}={bound.provider}" for bound in self.bound if bound.op in self.priority))

    def counts(self) -> dict[str, int]:
        """Calls per `op=provider`, of what actually ran."""
        totals: dict[str, int] = {}
        for bound in self.bound:
            key = f"{bound.op}={bound.provider}"
            totals[key] = totals.get(key, 0) + bound.calls
        return totals
