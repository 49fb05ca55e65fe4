"""Which files of a repository make a model directory."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from rapid_infer.errors import HubError
from rapid_infer.hub.entry import FileEntry
from rapid_infer.hub.lockfile import is_ours

PAPERS = ("LICENSE*", "NOTICE*", "README*")
TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", *PAPERS)
WEIGHT_FORMATS = (("model*.safetensors",), ("*.safetensors",), ("pytorch_model*.bin",))
"""In order of preference; only the first that a repository has is taken."""

_WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def select(entries: Sequence[FileEntry], include: Sequence[str] = ()) -> list[FileEntry]:
    """The files to fetch: those that match a pattern of `include`, or without any, what loading needs.

    That is one weight format (safetensors before .bin) of the top folder, configuration, tokenizer, chat templates,
    licence and README; no code. HubError when nothing is left, or without `include` no weights.
    """
    entries = [entry for entry in entries if not is_ours(entry.path)]
    if include:
        chosen = [entry for entry in entries if _matches(entry.path, include)]
        if not chosen:
            raise HubError(f"--include {' '.join(include)}: matches none of {_names(entries)}")
        return chosen
    top = [entry for entry in entries if "/" not in entry.path]
    weights = next((found for form in WEIGHT_FORMATS if (found := [e for e in top if _matches(e.path, form)])), [])
    if not weights:
        raise HubError(
            f"the repository has no safetensors and no pytorch_model.bin; it has {_names(entries)}; choose another "
            "repository, or files with --include"
        )
    suffix = ".safetensors" if weights[0].path.endswith(".safetensors") else ".bin"
    unused = {name for name in _WEIGHT_INDEXES if f"{suffix}." not in name}
    texts = [e for e in top if _matches(e.path, TEXT_FILES) and e.path not in unused]
    templates = [e for e in entries if "/" in e.path and e.path.endswith(".jinja")]
    kept = {entry.path for entry in (*texts, *templates, *weights)}
    return [entry for entry in entries if entry.path in kept]


def needed(entries: Sequence[FileEntry]) -> list[FileEntry]:
    """What loading needs, without the papers that come along. HubError as `select`."""
    return [entry for entry in select(entries) if not _matches(entry.path, PAPERS)]


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _names(entries: Sequence[FileEntry], shown: int = 8) -> str:
    names = [entry.path for entry in entries]
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
