"""What somebody may have meant who wrote a name that is not there."""

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from rapid_infer.hub.cache import cache_dir

_LOOKED_AT = 2000
"""Directory entries: a home directory or a network share can have any number."""


def near_models(name: str, *, local: bool = True) -> list[str]:
    """Up to three names like `name` that can be given for a model: models in the cache, and directories near by."""
    path = Path(name).expanduser()
    folders = [path.parent, Path("models")] if local else []
    near = {child.name.casefold(): str(child) for folder in folders for child in _directories(folder)}
    cached = {
        repo.name.casefold(): f"{repo.parent.name}/{repo.name}" for repo in _directories(cache_dir(), "models/*/*/*")
    }
    names = cached | near
    wanted = path.name.casefold()
    parts = [known for known in sorted(names) if wanted and (wanted in known or (len(known) > 3 and known in wanted))]
    close = get_close_matches(wanted, sorted(names), n=3)
    return [names[known] for known in dict.fromkeys([*close, *parts])][:3]


def did_you_mean(name: str, *, local: bool = True) -> str:
    """The same as the end of a message; empty when nothing is like it."""
    near = near_models(name, local=local)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _directories(folder: Path, pattern: str = "*") -> Iterable[Path]:
    try:
        found = sorted(path for path in islice(folder.glob(pattern), _LOOKED_AT) if path.is_dir())
    except (OSError, ValueError):
        return []
    return [path for path in found if not path.name.startswith(".")]
