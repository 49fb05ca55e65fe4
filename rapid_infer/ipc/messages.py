"""What a front and an engine process say to each other, as msgpack. A step's results are lists, not objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from rapid_infer import errors
from rapid_infer.cache.prefix import HashExtra
from rapid_infer.config import EngineArgs
from rapid_infer.engine.request import Request
from rapid_infer.engine.results import Finished, StepOutputs, TokenLogprobs
from rapid_infer.frontend import EngineInfo
from rapid_infer.outputs import FinishReason
from rapid_infer.params import SamplingParams
from rapid_infer.registry import Entry


class Start(msgspec.Struct, tag="start"):
    """The first message: what to load. `args` are the fields of `EngineArgs` that differ from their defaults."""

    path: str
    entry: Entry
    args: dict[str, Any]
    log_level: int


class AddRequest(msgspec.Struct, tag="add"):
    """A `Request`. `params` are the fields of `SamplingParams` that differ from their defaults."""

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


class Stop(msgspec.Struct, tag="stop"):
    """End the process; requests that run get no more output."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded. `defaults` are what it recommends for SamplingParams."""

    info: EngineInfo
    defaults: dict[str, Any]


class StartFailed(msgspec.Struct, tag="start_failed"):
    """`error` names a class of `rapid_infer.errors`, or whatever else was raised."""

    error: str
    message: str


class PackedLogprobs(msgspec.Struct):
    """Log-probabilities of positions one after the other; `counts` says how many ids and values each one has."""

    counts: list[int] = []
    ranks: list[int] = []
    token_ids: list[int] = []
    values: list[float] = []


class Outputs(msgspec.Struct, tag="outputs", omit_defaults=True):
    """A `StepOutputs`: new tokens, ends, log-probabilities, and starts, each as parallel lists."""

    request_ids: list[str] = []
    token_ids: list[int] = []
    ended: list[str] = []
    reasons: list[FinishReason] = []
    errors: list[str | None] = []
    cached: list[int] = []
    logprob_ids: list[str] = []
    logprobs: PackedLogprobs | None = None
    prompt_logprob_ids: list[str] = []
    prompt_logprob_counts: list[int] = []
    """How many positions each of `prompt_logprob_ids` has in `prompt_logprobs`."""
    prompt_logprobs: PackedLogprobs | None = None
    started: list[str] = []
    started_cached: list[int] = []


class RequestRefused(msgspec.Struct, tag="refused"):
    """The engine did not take this request; there will be no output for it."""

    request_id: str
    error: str


class Stats(msgspec.Struct, tag="stats"):
    """How busy the engine is. `num_late_graphs`: CUDA graphs recorded while requests waited, for so many seconds."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_usable_blocks: int
    num_late_graphs: int = 0
    late_graph_seconds: float = 0.0


class Died(msgspec.Struct, tag="died"):
    """The last message of an engine that cannot go on."""

    message: str


ToEngine = Start | AddRequest | Abort | ResetPrefixCache | GetStats | Stop
FromEngine = Ready | StartFailed | Outputs | RequestRefused | Stats | Died

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


def changed_fields(value: EngineArgs | SamplingParams) -> dict[str, Any]:
    """The fields that differ from what the class gives when they are left out."""
    changed = {}
    for field in dataclasses.fields(value):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if (mine := getattr(value, field.name)) != default:
            changed[field.name] = mine
    return changed


def pack_request(request: Request) -> AddRequest:
    """`request` must be new: what the engine keeps in it later does not travel."""
    return AddRequest(
        request.request_id,
        request.prompt_token_ids.tobytes(),
        changed_fields(request.params),
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


def pack_step(step: StepOutputs) -> Outputs:
    outputs = Outputs(step.request_ids, step.token_ids)
    if step.num_cached_tokens:
        outputs.started = list(step.num_cached_tokens)
        outputs.started_cached = list(step.num_cached_tokens.values())
    if step.finished:
        outputs.ended = [one.request_id for one in step.finished]
        outputs.reasons = [one.reason for one in step.finished]
        outputs.errors = [one.error for one in step.finished]
        outputs.cached = [one.num_cached_tokens for one in step.finished]
    if step.logprobs:
        outputs.logprob_ids = list(step.logprobs)
        outputs.logprobs = _pack_logprobs(step.logprobs.values())
    if step.prompt_logprobs:
        outputs.prompt_logprob_ids = list(step.prompt_logprobs)
        outputs.prompt_logprob_counts = [len(pieces) for pieces in step.prompt_logprobs.values()]
        outputs.prompt_logprobs = _pack_logprobs(piece for pieces in step.prompt_logprobs.values() for piece in pieces)
    return outputs


def unpack_step(outputs: Outputs) -> StepOutputs:
    """The inverse of `pack_step`."""
    ends = zip(outputs.ended, outputs.reasons, outputs.errors, outputs.cached, strict=True)
    pieces = iter(_unpack_logprobs(outputs.prompt_logprobs))
    return StepOutputs(
        outputs.request_ids,
        outputs.token_ids,
        [Finished(*end) for end in ends],
        dict(zip(outputs.logprob_ids, _unpack_logprobs(outputs.logprobs), strict=True)),
        {
            name: [next(pieces) for _ in range(count)]
            for name, count in zip(outputs.prompt_logprob_ids, outputs.prompt_logprob_counts, strict=True)
        },
        dict(zip(outputs.started, outputs.started_cached, strict=True)),
    )


def _pack_logprobs(positions: Iterable[TokenLogprobs]) -> PackedLogprobs:
    packed = PackedLogprobs()
    for one in positions:
        packed.counts.append(len(one.token_ids))
        packed.ranks.append(one.rank)
        packed.token_ids += one.token_ids
        packed.values += one.values
    return packed


def _unpack_logprobs(packed: PackedLogprobs | None) -> Sequence[TokenLogprobs]:
    found: list[TokenLogprobs] = []
    if packed is not None:
        start = 0
        for count, rank in zip(packed.counts, packed.ranks, strict=True):
            stop = start + count
            found.append(TokenLogprobs(packed.token_ids[start:stop], packed.values[start:stop], rank))
            start = stop
    return found


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
