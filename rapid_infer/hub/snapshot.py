"""What a snapshot of Hugging Face's cache holds, by its links or the listing beside it, and whether it is whole."""

import json
import os
import re
from pathlib import Path

from rapid_infer.errors import HubError
from rapid_infer.hub.entry import FileEntry, checked_entry
from rapid_infer.hub.lockfile import listed
from rapid_infer.hub.selection import needed

_TREE_FORMAT = 1
_SHARD = re.compile(r"(.*-)(\d+)(-of-)(\d+)(\.\w+)")
_TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", ".model", ".tiktoken")


def snapshot_files(directory: Path) -> tuple[FileEntry, ...]:
    """The files of `.../models--org--name/snapshots/<commit>` that loading needs, with the digests they should have.

    A client that fetched the whole snapshot left the hub's listing beside it. Others left only links to blobs, named
    after their digests; then the snapshot must look whole: configuration, a tokenizer, all shards, nothing that was
    interrupted. HubError, without the directory's name, says why it is not, or cannot be verified.
    """
    files = _tree(directory)
    if files is not None:
        return tuple(needed(files))
    files = _linked(directory)
    try:
        chosen = needed(files)
    except HubError as error:
        raise HubError("it holds no weights") from error
    if unknown := [entry.path for entry in chosen if not entry.digest]:
        raise HubError(f"{listed(unknown)}: no link to a blob that is named after its digest, so it cannot be verified")
    if missing := _missing(directory, chosen):
        raise HubError("; ".join(missing))
    return tuple(chosen)


def _tree(directory: Path) -> list[FileEntry] | None:
    """The hub's listing that newer clients keep; None when there is none that can be read."""
    try:
        path = directory.parents[1] / "trees" / f"{directory.name}.json"
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format_version"] != _TREE_FORMAT:
            return None
        return [
            checked_entry(name, file["lfs_size"], "sha256", file["lfs_sha256"], "")
            if file.get("lfs_sha256")
            else checked_entry(name, file["size"], "git-sha1", file["blob_id"], "")
            for name, file in data["files"].items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, HubError):
        return None


def _linked(directory: Path) -> list[FileEntry]:
    """Every file with the digest that its link names, "" when it names none."""
    found = []
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            continue
        digest = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest):
            digest = ""
        size = path.stat().st_size if path.exists() else -1
        name = path.relative_to(directory).as_posix()
        found.append(FileEntry(name, size, "sha256" if len(digest) == 64 else "git-sha1", digest))
    return found


def _missing(directory: Path, chosen: list[FileEntry]) -> list[str]:
    """What a model needs and is not among `chosen`, as far as names and the index tell."""
    names = {entry.path for entry in chosen}
    wanted = {"config.json"}
    for name in sorted(names):
        if shard := _SHARD.fullmatch(name):
            stem, number, of, count, suffix = shard.groups()
            wanted |= {f"{stem}{i:0{len(number)}}{of}{count}{suffix}" for i in range(1, int(count) + 1)}
        elif name.endswith(".index.json") and not names & {"model.safetensors", "pytorch_model.bin"}:
            wanted |= _indexed(directory / name)
    missing = [f"{name} is missing" for name in sorted(wanted - names)]
    if not any(name.endswith(_TOKENIZERS) for name in names):
        missing.append("a tokenizer is missing")
    blobs = directory.parents[1] / "blobs"
    started = {path.name.partition(".")[0] for path in blobs.glob("*.incomplete")}
    return missing + [f"the download of blob {name[:12]} was not finished" for name in sorted(started - _names(blobs))]


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")}


def _indexed(index: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(f"{index.name} cannot be read ({type(error).__name__})") from error
