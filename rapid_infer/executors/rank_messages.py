"""What the process that owns the engine and its ranks say to each other, as msgpack; arrays go as their bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from rapid_infer.config import EngineConfig
from rapid_infer.engine.row_fields import ROW_DTYPE
from rapid_infer.engine.step_plan import RowMasks, StepPlan, StepResult

_KINDS = (*map(np.dtype, (np.int32, np.float32, np.int64, np.bool_)), ROW_DTYPE)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}


class Join(msgspec.Struct, tag="join"):
    """Meet the other ranks at this port; the first message, over the socket."""

    rank: int
    ranks: int
    port: int
    device: str
    log_level: int
    plan_bytes: int
    result_bytes: int


class Build(msgspec.Struct, tag="build"):
    """Build and load a model: `target` is its class, "module:Class"."""

    path: str
    target: str
    config: EngineConfig


class Profile(msgspec.Struct, tag="profile"):
    """Answered by `Profiled`."""


class Allocate(msgspec.Struct, tag="allocate"):
    """The caches, with so many blocks of each pool, the same on every rank; then record steps."""

    num_blocks: tuple[int, ...]


class Step(msgspec.Struct, tag="step"):
    """Run a step; the first rank writes its result. `gated`: only the forward, a `Sample` follows.

    `plan` is what `encode_plan` makes, without `step` and `max_seq_len`, which a steady batch changes alone; None: as
    in the message before.
    """

    step: int
    max_seq_len: int
    plan: bytes | None
    gated: bool = False


class Sample(msgspec.Struct, tag="sample"):
    masks: RowMasks | None


class Drain(msgspec.Struct, tag="drain"):
    """Finish all steps; then the first rank writes `mark` where results go."""

    mark: bytes


class Unload(msgspec.Struct, tag="unload"):
    """Drop the model; another may follow."""


class Leave(msgspec.Struct, tag="leave"):
    """End the process."""


ToRank = Join | Build | Profile | Allocate | Step | Sample | Drain | Unload | Leave


class Done(msgspec.Struct, tag="done"):
    """The phase asked for is done."""

    phase: str


class Profiled(msgspec.Struct, tag="profiled"):
    """What this rank can allocate: blocks of each pool, and the longest sequence that fits."""

    num_blocks: tuple[int, ...]
    max_model_len: int
    bytes_read: int


class Failed(msgspec.Struct, tag="failed"):
    """This rank raised; `kind` is a class of `rapid_infer.errors` or None. It waits to be ended."""

    kind: str | None
    text: str
    traceback: str
    phase: str
    step: int
    connection: bool
    """Whether it is about a connection to another rank, which then is the one to look at."""


FromRank = Done | Profiled | Failed


def _encode_array(value: Any) -> tuple[int, tuple[int, ...], bytes]:
    if isinstance(value, np.ndarray):
        return _CODES[value.dtype], value.shape, value.tobytes()
    raise NotImplementedError(f"cannot send {type(value).__name__}")


def _decode_array(kind: Any, value: Any) -> np.ndarray:
    code, shape, data = value
    return np.frombuffer(data, _KINDS[code]).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=_decode_array)
_from_rank = msgspec.msgpack.Decoder(FromRank)
_plan = msgspec.msgpack.Decoder(StepPlan, dec_hook=_decode_array)
_result = msgspec.msgpack.Decoder(StepResult, dec_hook=_decode_array)


def encode(message: ToRank | FromRank | StepResult) -> bytes:
    return _encoder.encode(message)


def encode_plan(plan: StepPlan) -> bytes:
    """All that two steps of a steady batch have alike."""
    return _encoder.encode(replace(plan, step=0, max_seq_len=0))


def to_plan(payload: bytes) -> StepPlan:
    return _plan.decode(payload)


def to_rank(payload: bytes) -> ToRank:
    return _to_rank.decode(payload)


def from_rank(payload: bytes) -> FromRank:
    return _from_rank.decode(payload)


def to_result(payload: bytes) -> StepResult:
    return _result.decode(payload)
