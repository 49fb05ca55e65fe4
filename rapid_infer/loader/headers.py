"""What a weight file holds, without its data: names, shapes, types, positions. Says why a file cannot be read.

Safetensors headers are parsed here rather than by the library, because the library does not say why it refuses a file.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rapid_infer.errors import WeightError

LFS_MARK = b"version https://git-lfs.github.com/spec/v1"
MAX_HEADER = 100_000_000  # the format's own limit

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file: its name, shape and type as torch sees them, size and position in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    nbytes: int
    offset: int = 0


def read_header(file: Path) -> list[TensorInfo]:
    """The tensors of a .safetensors or .bin file in the order of their data. WeightError: cannot be read, and why."""
    refuse_rubbish(file)
    infos = _safetensors_header(file) if file.suffix == ".safetensors" else _bin_header(file)
    return sorted(infos, key=lambda info: info.offset)


def refuse_rubbish(file: Path) -> None:
    """WeightError when `file` is no weight file at all: unreadable, empty, a Git-LFS pointer, a web page."""
    try:
        with file.open("rb") as stream:
            start = stream.read(512)
    except OSError as error:
        raise WeightError(f"{file}: cannot be read: {error.strerror or error}") from error
    if not start:
        raise WeightError(f"{file}: the file is empty; the download is incomplete, fetch it again")
    if start.startswith(LFS_MARK):
        raise WeightError(f"{file}: a Git-LFS pointer, not the weights; run `git lfs pull` in {file.parent}")
    if start.lstrip().startswith(b"<"):
        raise WeightError(f"{file}: a web page (HTML or XML), not weights; the download saved an error or login page")


def _safetensors_header(file: Path) -> list[TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= MAX_HEADER else b""
    if size < 8 or not text.startswith(b"{"):
        raise WeightError(f"{file}: not a safetensors file; it starts with {_start(file)!r}")
    if len(text) < length:
        raise WeightError(f"{file}: truncated inside its header: {_sizes(8 + length, size)}")
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        infos = [_entry(file, 8 + length, name, entry) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{file}: the safetensors header is damaged ({error}); fetch the file again") from error
    expected = max((info.offset + info.nbytes for info in infos), default=8 + length)
    if size < expected:
        raise WeightError(f"{file}: truncated: {_sizes(expected, size)}")
    if size > expected:
        raise WeightError(f"{file}: longer than its header says: expected {expected} bytes, the file has {size}")
    return infos


def _entry(file: Path, data: int, name: str, entry: dict[str, Any]) -> TensorInfo:
    start, stop = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise WeightError(f"{file}: tensor {name} has type {entry['dtype']}, which this version of torch cannot hold")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if dtype == torch.float4_e2m1fn_x2:
        # The file counts single 4-bit values, torch counts pairs.
        shape = (*shape[:-1], shape[-1] // 2)
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"tensor {name} of shape {list(shape)} has {stop - start} bytes")
    return TensorInfo(name, shape, dtype, file, stop - start, data + start)


def load_bin(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .bin file, mapped into memory rather than read. WeightError: refused, and why."""
    advice = "convert the checkpoint to safetensors, or fetch the safetensors files"
    try:
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightError(
            f"{file}: refused, because unpickling it would run code ({_reason(error)}); {advice}"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise WeightError(f"{file}: {_bin_cause(file, error)}; {advice}") from error
    if not isinstance(content, dict):
        raise WeightError(f"{file}: holds a {type(content).__name__}, not a dict of tensors; {advice}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise WeightError(f"{file}: entry {name!r} is a {type(tensor).__name__}, not a tensor; {advice}")
    return content


def _bin_header(file: Path) -> list[TensorInfo]:
    tensors = load_bin(file)
    first = min((tensor.data_ptr() for tensor in tensors.values()), default=0)
    return [
        TensorInfo(name, tuple(tensor.shape), tensor.dtype, file, tensor.nbytes, tensor.data_ptr() - first)
        for name, tensor in tensors.items()
    ]


def _bin_cause(file: Path, error: Exception) -> str:
    start = _start(file)
    if zipfile.is_zipfile(file):
        return f"not a file of tensors ({_first_sentence(error)})"
    if start.startswith(b"PK"):
        return f"truncated or damaged ({file.stat().st_size} bytes, no end of archive)"
    if start.startswith(b"\x80"):
        return "written in the old torch format, which cannot be read lazily"
    return f"not a torch file; it starts with {start!r}"


def _reason(error: pickle.UnpicklingError) -> str:
    """What was refused, out of torch's long text."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    return f"it names {named[1]}" if named else _first_sentence(error)


def _first_sentence(error: Exception) -> str:
    return re.split(r"\.\s|\n", str(error))[0]


def _start(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(16)


def _sizes(expected: int, size: int) -> str:
    return f"expected {expected} bytes, the file has {size}; the download is incomplete, fetch it again"
