"""What a checkpoint directory holds, from file headers only, and how its tensors are read slice by slice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rapid_infer.errors import WeightError
from rapid_infer.loader.headers import TensorInfo, load_bin, read_header, refuse_rubbish

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
LISTED = 20


Read = Callable[[str, tuple[slice, ...]], torch.Tensor]
"""`tensor[source]` of a named tensor, on the CPU; read from the file when it is used, while the file is open."""


@dataclass(frozen=True)
class Inventory:
    """All tensors of a checkpoint by name, in the order of files and of data within a file."""

    directory: Path
    tensors: Mapping[str, TensorInfo]

    @staticmethod
    def scan(directory: str | Path) -> Inventory:
        """Reads the headers of all weight files in `directory`; no weights.

        Taken in this order: model.safetensors; model.safetensors.index.json with its shards; any other .safetensors
        files; pytorch_model.bin; pytorch_model.bin.index.json with its shards. WeightError: no weight files, absent or
        truncated shards, files that are no weight files, an index that does not fit its shards.
        """
        folder = Path(directory)
        if not folder.is_dir():
            raise WeightError(f"{folder}: no such directory")
        for single, index in zip(SINGLE, INDEX):
            if (folder / single).is_file():
                return Inventory(folder, _merge_headers([folder / single]))
            if (folder / index).is_file():
                return Inventory(folder, _read_shards(folder / index))
            loose = _find_loose(folder) if single == SINGLE[0] else []
            if loose:
                return Inventory(folder, _merge_headers(loose))
        raise WeightError(
            f"{folder}: no weight files (.safetensors or pytorch_model.bin); the directory {_describe_folder(folder)}"
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, in order."""
        return tuple(dict.fromkeys(info.file for info in self.tensors.values()))

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @contextmanager
    def open(self, file: Path) -> Iterator[Read]:
        """Opens one of `files` for lazy reading. WeightError when it can no longer be read."""
        if file.suffix != ".safetensors":
            tensors = load_bin(file)
            yield lambda name, source: tensors[name][source]
            return
        try:
            handle = safe_open(file, "pt")
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{file}: cannot be read: {error}") from error
        with handle as opened:
            yield partial(self._read_slice, opened)

    def _read_slice(self, handle: safe_open, name: str, source: tuple[slice, ...]) -> torch.Tensor:
        info = self.tensors[name]
        # get_slice knows neither scalars nor packed 4-bit values; get_tensor is a view of the mapped file as well.
        if not info.shape or info.dtype == torch.float4_e2m1fn_x2:
            return handle.get_tensor(name)[source]
        return handle.get_slice(name)[source or (slice(None),)]


def _merge_headers(files: list[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file):
            if info.name in tensors:
                raise WeightError(
                    f"{file.parent}: tensor {info.name} is both in {tensors[info.name].file.name} and in {file.name}; "
                    "remove the files that do not belong to the checkpoint"
                )
            tensors[info.name] = info
    return tensors


def _read_shards(index: Path) -> dict[str, TensorInfo]:
    """All tensors of the shards; where two shards have the same name, the index decides."""
    shard_of = _read_index(index)
    shards = sorted(set(shard_of.values()))
    absent = [shard for shard in shards if not (index.parent / shard).is_file()]
    if absent:
        raise WeightError(
            f"{index.parent}: {len(absent)} of {len(shards)} shards that {index.name} names are absent "
            f"(incomplete download): {', '.join(absent)}"
        )
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        held = {info.name: info for info in read_header(index.parent / shard)}
        lacking = [name for name, home in shard_of.items() if home == shard and name not in held]
        if lacking:
            raise WeightError(
                f"{index}: {len(lacking)} tensors that the index places in {shard} are not there "
                f"(files of different versions?): {', '.join(lacking)}"
            )
        tensors |= {name: info for name, info in held.items() if shard_of.get(name, shard) == shard}
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    refuse_rubbish(index)
    try:
        shard_of = json.loads(index.read_bytes())["weight_map"]
        names = {str(name): Path(shard) for name, shard in shard_of.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(
            f'{index}: not a weight index (JSON with a "weight_map" from tensors to files): {error}; fetch it again'
        ) from error
    for shard in set(names.values()):
        if shard.is_absolute() or ".." in shard.parts:
            raise WeightError(f"{index}: shard {shard} lies outside the checkpoint directory")
    return {name: shard.as_posix() for name, shard in names.items()}


def _find_loose(folder: Path) -> list[Path]:
    """Safetensors files without an index. WeightError when they are numbered and one is absent."""
    files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
    names = {file.name for file in files}
    absent: set[str] = set()
    for name in names:
        numbered = re.fullmatch(r"(.*-)(\d+)-of-(\d+)\.safetensors", name)
        if numbered:
            stem, digits, count = numbered[1], len(numbered[2]), numbered[3]
            wanted = {f"{stem}{number:0{digits}}-of-{count}.safetensors" for number in range(1, int(count) + 1)}
            absent |= wanted - names
    if absent:
        raise WeightError(
            f"{folder}: {len(absent)} shards are absent (incomplete download): {', '.join(sorted(absent))}"
        )
    return files


def _describe_folder(folder: Path) -> str:
    names = sorted(
        entry.name + ("/" if entry.is_dir() else "" if entry.exists() else " (broken link)")
        for entry in folder.iterdir()
    )
    if not names:
        return "is empty"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"holds {', '.join(names[:LISTED])}{more}"
