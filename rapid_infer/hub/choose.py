"""Which hub: the user's word, else the configured order, with short waits and a fall-back."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rapid_infer.errors import HubError
from rapid_infer.hub.huggingface import HuggingFace
from rapid_infer.hub.modelscope import ModelScope
from rapid_infer.hub.reference import ModelRef
from rapid_infer.hub.source import Source, SourceError

HUB_VARIABLE = "RAPID_INFER_HUB"
ORDER = ("huggingface", "modelscope")
FALLBACK_SECONDS = 6.0
"""How long a hub may take to list a model while another one is left to be asked."""
LIST_SECONDS = 120.0
"""The same when none is left: one of the clients would wait for ever."""

_KINDS = {"hf": "huggingface", "ms": "modelscope"}
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Mirrors; None takes each client's own variable, else the public site."""

    huggingface: str | None = None
    modelscope: str | None = None


PUBLIC = Endpoints()


def hub_order(ref: ModelRef, hub: str) -> tuple[str, ...]:
    """The hubs to ask for `ref`, in order; none for a local model.

    HubError when `hub` is not one, or contradicts the reference.
    """
    wanted = _parse(hub, "hub")
    if ref.kind in ("path", "demo"):
        return ()
    if ref.kind in _KINDS:
        named = _KINDS[ref.kind]
        if wanted is not None and named not in wanted:
            raise HubError(
                f"model '{ref.kind}:{ref.name}': got hub {hub!r} beside '{ref.kind}:'; expected one hub; "
                "drop one of them"
            )
        return (named,)
    return wanted or _parse(os.environ.get(HUB_VARIABLE, ""), HUB_VARIABLE) or ORDER


def _parse(text: str, what: str) -> tuple[str, ...] | None:
    names = tuple(name.strip() for name in text.split(","))
    if names in (("",), ("auto",)):
        return None
    if unknown := [name for name in names if name not in ORDER]:
        raise HubError(
            f"{what}: got {unknown[0]!r}; expected one of auto, {', '.join(ORDER)}, or several in order, separated by "
            "commas; choose one of these"
        )
    return tuple(dict.fromkeys(names))


def open_source(name: str, endpoints: Endpoints) -> Source:
    """The hub of that name; nothing is contacted yet."""
    return HuggingFace(endpoints.huggingface) if name == "huggingface" else ModelScope(endpoints.modelscope)


def is_offline() -> bool:
    """Whether the environment forbids the network, in the words of Hugging Face's client."""
    return any(os.environ.get(name, "").strip().upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE_VARIABLES)


def within(seconds: float, action: Callable[[], T], what: str) -> T:
    """`action()`, or SourceError when it takes longer; it is then left behind in its thread.

    The clients retry for longer than a user should wait, and take no deadline.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    if errors:
        raise errors[0]
    raise SourceError(f"{what}: no answer within {seconds:.0f} s")
