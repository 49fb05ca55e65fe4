"""From a model reference to the local directory that holds its files."""

import logging
import sys
from contextlib import nullcontext
from pathlib import Path

from rapid_infer.errors import HubError
from rapid_infer.hub.choose import PUBLIC, Endpoints, hub_order, is_offline, open_source
from rapid_infer.hub.client_cache import find
from rapid_infer.hub.demo import resolve_demo
from rapid_infer.hub.download import Download, Wanted, download, only_writer
from rapid_infer.hub.lockfile import Lock, listed, read_lock, wrong_sizes
from rapid_infer.hub.near import did_you_mean
from rapid_infer.hub.progress import watching
from rapid_infer.hub.reference import FORMS, WEIGHT_FILES, ModelRef
from rapid_infer.hub.source import Source
from rapid_infer.hub.store import problems, recall

logger = logging.getLogger(__name__)

_EDITED = (".json", ".jinja", ".md")
"""What people change in their own directories, as some models' cards tell them to; half of one does not parse."""


def resolve(ref: str, *, revision: str | None = None, hub: str = "auto", offline: bool | None = None) -> Path:
    """Turn a model reference into an absolute local directory that holds its files; download them when needed.

    A local directory is returned as it is, `demo` means the demo checkpoint (made on first use; a directory of that
    name is `./demo`), and `org/name` means a local directory of that name when there is one. `revision` and `hub`
    ("auto", "huggingface", "modelscope", or several with commas) say which repository a hub name means. A model that
    was downloaded before, by us or by a hub's own client, is used as it is and where it is, without network, whatever
    its branch means by now: `rapid-infer download` asks anew. `offline` None follows HF_HUB_OFFLINE.

    Raises HubError when there is no such directory, when it is empty, a file or incomplete, when options contradict
    the reference, when offline and not downloaded, and when no hub gives the model.
    """
    parsed = parse(ref, revision, hub)
    if parsed.kind == "demo":
        return resolve_demo()
    if parsed.kind == "path":
        return local_directory(parsed.name)
    found = _downloaded(parsed, hub)
    if isinstance(found, tuple):
        return found[0]
    if is_offline() if offline is None else offline:
        raise _offline_error(ref, parsed, found)
    with watching() as watcher, only_writer(parsed, None, watcher):
        # Whoever waited for the lock finds what its holder has fetched.
        again = _ours(parsed, hub)
        if isinstance(again, tuple):
            return again[0]
        return download(Wanted(parsed, hub, unused=tuple(found)), watcher).directory


def fetch(
    ref: str,
    *,
    to: Path | None = None,
    revision: str | None = None,
    hub: str = "auto",
    include: tuple[str, ...] = (),
    endpoints: Endpoints = PUBLIC,
    dry_run: bool = False,
    offline: bool | None = None,
    force: bool = False,
) -> Download:
    """Download a hub model into `to` or the cache; asks the hub what the revision means now. HubError as `resolve`.

    `include` are patterns of paths to take instead of what loading needs; `dry_run` only says what would be fetched;
    `offline` only looks at what is there; `force` lets files of another model in `to`, and changed ones, be replaced.
    """
    parsed = parse(ref, revision, hub, local=False)
    if parsed.kind in ("path", "demo"):
        raise HubError(
            f"model {ref!r}: got no name that a hub can have; expected org/name, hf:org/name or ms:org/name to "
            f"download, with the model's owner before the slash{did_you_mean(parsed.name, local=False)}"
        )
    if to is not None and to.exists() and not to.is_dir():
        raise HubError(f"{to}: got a file; expected a directory to download into; choose another one")
    if is_offline() if offline is None else offline:
        return _earlier(ref, parsed, hub, to)
    wanted = Wanted(parsed, hub, to, include, endpoints, dry_run, force)
    with watching() as watcher, nullcontext() if dry_run else only_writer(parsed, to, watcher):
        return download(wanted, watcher)


def _earlier(ref: str, parsed: ModelRef, hub: str, to: Path | None) -> Download:
    """What an earlier download left, when nothing of it is missing."""
    found = _downloaded(parsed, hub) if to is None else _in_directory(to)
    if not isinstance(found, tuple):
        raise _offline_error(ref, parsed, found)
    directory, lock = found
    place = (lock.source, lock.endpoint, lock.repo, lock.revision, lock.commit)
    return Download(directory, *place, reason="offline", files=lock.files, fetched=())


def _in_directory(to: Path) -> tuple[Path, Lock] | list[str]:
    lock = read_lock(to)
    if lock is None:
        return [f"{to} has no lock file"]
    wrong = wrong_sizes(to, lock.files)
    return [f"{to}: {listed(wrong)}"] if wrong else (to, lock)


def parse(ref: str, revision: str | None, hub: str, local: bool = True) -> ModelRef:
    """The reference with its options joined in; with `local`, an existing directory wins over a hub's name."""
    parsed = ModelRef.parse(ref)
    prefixed = ref.strip().startswith(("hf:", "ms:"))
    if local and parsed.kind in ("auto", "hf", "ms") and not prefixed and _exists(Path(ref.strip()).expanduser()):
        parsed = ModelRef("path", ref.strip())
    hub_order(parsed, hub)  # for its errors
    if parsed.kind in ("path", "demo"):
        if revision is not None:
            raise HubError(f"model {ref!r}: got revision {revision!r} for a local model; expected none; leave it out")
        return parsed
    if revision is not None and parsed.revision not in (None, revision):
        raise HubError(
            f"model {ref!r}: got revision {revision!r} beside '@{parsed.revision}'; expected one; drop the other"
        )
    return parsed.at(revision or parsed.revision)


def _downloaded(ref: ModelRef, hub: str) -> tuple[Path, Lock] | list[str]:
    """What was downloaded earlier, by us or by a hub's own client; else what is wrong with what there is."""
    ours = _ours(ref, hub)
    return ours if isinstance(ours, tuple) else _of_clients(ref, hub, ours)


def _ours(ref: ModelRef, hub: str) -> tuple[Path, Lock] | list[str]:
    """From the first hub in order of which there is a download that is complete."""
    wrong: list[str] = []
    for source in _sources(ref, hub):
        directory = recall(source.name, ref.name, ref.revision or source.default_revision)
        if directory is None:
            continue
        bad, lock = problems(directory), read_lock(directory)
        if not bad and lock is not None:
            return directory, lock
        wrong += [f"{directory}: {listed(bad)}"]
    return wrong


def _of_clients(ref: ModelRef, hub: str, wrong: list[str]) -> tuple[Path, Lock] | list[str]:
    for source in _sources(ref, hub):
        revision = ref.revision or source.default_revision
        found = find(source.name, source.endpoint, ref.name, revision, _say)
        if isinstance(found, tuple):
            logger.info("%s: used in the cache of its client, %s", ref.name, found[0])
            return found
        wrong = wrong + found
    return wrong


def _sources(ref: ModelRef, hub: str) -> list[Source]:
    return [open_source(name, PUBLIC) for name in hub_order(ref, hub)]


def _say(text: str) -> None:
    """For what takes a while before there is a watcher."""
    logger.info("%s", text)
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def _offline_error(ref: str, parsed: ModelRef, wrong: list[str]) -> HubError:
    what = "; ".join(wrong) or "it is not in the cache"
    tried = f"no local directory '{parsed.name}', " if parsed.kind == "auto" else ""
    return HubError(
        f"model {ref!r}: offline, {tried}and {what}; run `rapid-infer download {ref}` with network, or give a directory"
        f"{did_you_mean(parsed.name) if parsed.kind == 'auto' else ''}"
    )


def local_directory(name: str) -> Path:
    """Return `name` as an absolute directory with something in it and nothing missing, or raise HubError."""
    try:
        path = Path(name).expanduser().absolute()
        if path.is_dir():
            if (path / "snapshots").is_dir() and not (path / "config.json").exists():
                raise _cache_folder_error(path)
            if any(path.iterdir()):
                return _complete(path)
            raise HubError(
                f"model {name!r}: got an empty directory; expected one with config.json and weights; "
                "put the model's files there or give another directory"
            )
        found = path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise HubError(
            f"model {name!r}: cannot read this path ({error}); expected a readable directory; "
            "check the path and its permissions"
        ) from error
    if found:
        raise _file_error(name)
    bare = "" if set(name) & set("/\\~") else ", and a model on a hub is written with its owner"
    raise HubError(
        f"model {name!r}: got a path that does not exist{bare}; expected {FORMS}; check the spelling"
        f"{did_you_mean(name)}"
    )


def _complete(path: Path) -> Path:
    lock = read_lock(path)
    if lock is None:
        return path
    bad = [entry for entry in lock.files if wrong_sizes(path, [entry])]
    there = [entry for entry in bad if _exists(path / entry.path)]
    edited = [entry for entry in there if entry.path.endswith(_EDITED) and (path / entry.path).stat().st_size]
    if wrong := wrong_sizes(path, [entry for entry in bad if entry not in edited]):
        force = " --force" if there else ""
        raise HubError(
            f"{path}: {listed(wrong)}; finish the download: rapid-infer download {lock.ref} --to {path}{force}"
        )
    if edited:
        logger.warning("%s: changed since it was downloaded: %s", path, listed(wrong_sizes(path, edited)))
    return path


def _cache_folder_error(path: Path) -> HubError:
    repo = path.name.removeprefix("models--").replace("--", "/", 1)
    snapshots = sorted(str(found) for found in (path / "snapshots").iterdir())
    return HubError(
        f"{path}: got the folder in which a hub's client keeps {repo}; expected a directory with config.json and "
        f"weights; write {repo}, or give one of {listed(snapshots) or 'its snapshots, of which there is none'}"
    )


def _file_error(name: str) -> HubError:
    expected = "expected a directory with config.json and weights"
    if name.endswith(WEIGHT_FILES):
        return HubError(f"model {name!r}: got one weight file; {expected}; give the directory that holds this file")
    return HubError(f"model {name!r}: got a file; {expected}; give a directory")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
