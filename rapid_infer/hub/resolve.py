"""Model references: what a user may write for a model, and the local directory it means."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rapid_infer.errors import HubError
from rapid_infer.hub.demo import resolve_demo

RefKind = Literal["path", "demo", "hf", "ms", "auto"]

_REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[^\s@]+))?", re.ASCII)
_WEIGHT_FILES = (".gguf", ".safetensors")
_HUBS: dict[str, tuple[RefKind, str]] = {
    "auto": ("auto", "a model hub"),
    "huggingface": ("hf", "Hugging Face"),
    "modelscope": ("ms", "ModelScope"),
}
_FORMS = "a local directory, `demo`, `org/name`, `hf:org/name@revision` or `ms:org/name@revision`"


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model reference taken apart; `revision` is None when none was written.

    `kind` is "path" (name is the path as written), "demo", "hf" or "ms" (name is `org/name` on that hub) or "auto"
    (`org/name` with no hub named: a local directory of that name wins).
    """

    kind: RefKind
    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, ref: str) -> "ModelRef":
        """Take `ref` apart by its spelling alone, without looking at the disk.

        Raises HubError for an empty reference and for `hf:` or `ms:` not followed by `org/name[@revision]`.
        """
        ref = ref.strip()
        if not ref:
            raise HubError(f"model reference: got an empty string; expected {_FORMS}")
        if ref == "demo":
            return cls("demo", ref)
        kind: RefKind = "auto"
        prefix, colon, rest = ref.partition(":")
        if colon and prefix in ("hf", "ms"):
            kind = "hf" if prefix == "hf" else "ms"
            ref = rest
        match = _REPOSITORY.fullmatch(ref)
        if kind == "auto" and (match is None or ref.endswith(_WEIGHT_FILES)):
            return cls("path", ref)
        if match is None:
            written = f"{prefix}:{rest}"
            raise HubError(
                f"model reference: got {written!r}; expected {prefix}:org/name or {prefix}:org/name@revision; "
                "write the repository's full name"
            )
        return cls(kind, match["name"], match["revision"])


def resolve(ref: str, *, revision: str | None = None, hub: str = "auto") -> Path:
    """Turn a model reference into an absolute local directory that holds its files.

    A local directory is returned as it is, `demo` means the demo checkpoint (made on first use; a directory of that
    name is `./demo`), and `org/name` means a local directory of that name when there is one. `revision` and `hub`
    ("auto", "huggingface" or "modelscope") say which repository a hub name means.

    Raises HubError when there is no such directory, when it is empty or a file, when options contradict the
    reference, and for every hub reference: this version does not download from hubs yet.
    """
    if hub not in _HUBS:
        raise HubError(f"hub: got {hub!r}; expected one of {', '.join(_HUBS)}; choose one of these")
    parsed = ModelRef.parse(ref)
    if parsed.kind == "auto" and _exists(Path(ref.strip()).expanduser()):
        parsed = ModelRef("path", ref.strip())
    if parsed.kind in ("path", "demo"):
        if revision is not None:
            raise HubError(f"model {ref!r}: got revision {revision!r} for a local model; expected none; leave it out")
        return resolve_demo() if parsed.kind == "demo" else _local_directory(parsed.name)
    raise _no_download(ref, parsed, revision, hub)


def _no_download(ref: str, parsed: ModelRef, revision: str | None, hub: str) -> HubError:
    """Return the error for a reference to a hub, after checking that the options agree with it."""
    if revision is not None and parsed.revision not in (None, revision):
        return HubError(
            f"model {ref!r}: got revision {revision!r} beside '@{parsed.revision}'; expected one; drop the other"
        )
    wanted, place = _HUBS[hub]
    if parsed.kind != "auto":
        if wanted not in ("auto", parsed.kind):
            return HubError(
                f"model {ref!r}: got hub {hub!r} beside '{parsed.kind}:'; expected one hub; drop one of them"
            )
        place = next(text for kind, text in _HUBS.values() if kind == parsed.kind)
    tried = f"no local directory '{parsed.name}', and " if parsed.kind == "auto" else ""
    return HubError(
        f"model {ref!r}: got a name on {place}; {tried}this version does not download from hubs yet; "
        "expected a local directory or `demo`: download the files yourself and give their directory"
    )


def _local_directory(name: str) -> Path:
    """Return `name` as an absolute directory with something in it, or raise HubError."""
    try:
        path = Path(name).expanduser().absolute()
        if path.is_dir():
            if any(path.iterdir()):
                return path
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
    raise HubError(f"model {name!r}: got a path that does not exist; expected {_FORMS}; check the spelling")


def _file_error(name: str) -> HubError:
    expected = "expected a directory with config.json and weights"
    if name.endswith(_WEIGHT_FILES):
        return HubError(f"model {name!r}: got one weight file; {expected}; give the directory that holds this file")
    return HubError(f"model {name!r}: got a file; {expected}; give a directory")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
