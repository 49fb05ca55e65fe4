"""What a front and an engine process say to each other, as msgpack."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from rapid_infer import errors
from rapid_infer.cache.prefix import HashExtra
from rapid_infer.config import EngineArgs
from rapid_infer.engine.request import Request
from rapid_infer.engine.results import StepOutputs
from rapid_infer.frontend import EngineInfo
from rapid_infer.params import SamplingParams
from rapid_infer.registry import Entry


class Start(msgspec.Struct, tag="start"):
    """The first message: what to load."""

    path: str
    entry: Entry
    args: EngineArgs
    log_level: int


class AddRequest(msgspec.Struct, tag="add"):
    """A `Request`. `params` are the fields of `SamplingParams`."""

    request_id: str
    prompt: bytes
    """The token ids as int32."""
    params: dict[str, Any]
    stop_token_ids: tuple[int, ...]
    limit: int
    seed: int
    sample_index: int
    cache_salt: bytes | None
    extras: tuple[HashExtra, ...] = ()


class Abort(msgspec.Struct, tag="abort"):
    """End these requests; ids that are unknown or already ended are ignored."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset"):
    """Forget all cached prefixes."""


class GetStats(msgspec.Struct, tag="get_stats"):
    """Answered by one `Stats`, in order, between two steps."""


class StartProfile(msgspec.Struct, tag="start_profile"):
    """Record steps, at most `num_steps`, for a trace in `folder`. Answered by one `Profiled`."""

    folder: str
    prefix: str
    num_steps: int | None


class StopProfile(msgspec.Struct, tag="stop_profile"):
    """Answered by one `Profiled`, when the trace is on disk."""


class Listen(msgspec.Struct, tag="listen"):
    """Let further fronts connect to this Unix socket. Not answered."""

    path: str


class Stop(msgspec.Struct, tag="stop"):
    """End the process; requests that run get no more output."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded."""

    info: EngineInfo


class StartFailed(msgspec.Struct, tag="start_failed"):
    """`error` names a class of `rapid_infer.errors`, or whatever else was raised."""

    error: str
    message: str


class Outputs(msgspec.Struct, tag="outputs"):
    """What a step gave."""

    step: StepOutputs


class RequestRefused(msgspec.Struct, tag="refused"):
    """The engine did not take this request; there will be no output for it."""

    request_id: str
    error: str


class Stats(msgspec.Struct, tag="stats"):
    """How busy the engine is. `num_preemptions`: since it started. `num_late_graphs`: CUDA graphs recorded while
    requests waited, for so many seconds.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_usable_blocks: int
    num_preemptions: int = 0
    num_late_graphs: int = 0
    late_graph_seconds: float = 0.0


class Profiled(msgspec.Struct, tag="profiled"):
    """Where the trace is or will be; or why not."""

    path: str
    error: str | None = None


class Died(msgspec.Struct, tag="died"):
    """The last message of an engine that cannot go on."""

    message: str


ToEngine = Start | AddRequest | Abort | ResetPrefixCache | GetStats | StartProfile | StopProfile | Listen | Stop
FromEngine = Ready | StartFailed | Outputs | RequestRefused | Stats | Profiled | Died

_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)


def _plain(value: object) -> object:
    """Users pass numpy's numbers and enums of text, which are numbers and texts."""
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise NotImplementedError(f"{value!r:.80} is a {type(value).__name__}, which cannot be sent to an engine process")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def encode(message: ToEngine | FromEngine) -> bytes:
    """ValueError for a value that has no place in msgpack."""
    try:
        return _ENCODER.encode(message)
    except (NotImplementedError, OverflowError, TypeError) as error:
        raise ValueError(str(error)) from error


def to_engine(payload: bytes) -> ToEngine:
    """The message in a frame from a front. msgspec.DecodeError when it is none."""
    return _TO_ENGINE.decode(payload)


def from_engine(payload: bytes) -> FromEngine:
    """The message in a frame from an engine. msgspec.DecodeError when it is none."""
    return _FROM_ENGINE.decode(payload)


def pack_request(request: Request) -> AddRequest:
    """`request` must be new: what the engine keeps in it later does not travel."""
    return AddRequest(
        request.request_id,
        request.prompt_token_ids.tobytes(),
        vars(request.params),
        request.stop_token_ids,
        request.limit,
        request.seed,
        request.sample_index,
        request.cache_salt,
        request.extras,
    )


def unpack_request(message: AddRequest) -> Request:
    """RequestError for parameters that no `SamplingParams` may have."""
    return Request(
        message.request_id,
        np.frombuffer(message.prompt, np.int32),
        SamplingParams.from_dict(message.params),
        message.stop_token_ids,
        message.limit,
        message.seed,
        message.sample_index,
        message.cache_salt,
        message.extras,
    )


def pack_failure(error: BaseException) -> StartFailed:
    """Named by the class of `rapid_infer.errors` that it is one of, if any."""
    typed = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return StartFailed(next(typed, type(error).__name__), str(error))


def unpack_failure(message: StartFailed) -> errors.RapidInferError:
    """The same typed error again; EngineDeadError for one that rapid_infer does not raise on purpose."""
    kind = getattr(errors, message.error, None)
    if isinstance(kind, type) and issubclass(kind, errors.RapidInferError):
        return kind(message.message)
    return errors.EngineDeadError(f"the engine did not start: {message.error}: {message.message}")
