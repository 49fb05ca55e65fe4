"""Model references: what a user may write for a model."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from rapid_infer.errors import HubError
from rapid_infer.hub.url import model_page

RefKind = Literal["path", "demo", "hf", "ms", "auto"]

WEIGHT_FILES = (".gguf", ".safetensors")
FORMS = "a local directory, `demo`, `org/name`, `hf:org/name@revision` or `ms:org/name@revision`"

_REPOSITORY = re.compile(r"(?P<name>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[^\s@]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model reference taken apart; `revision` is None when none was written.

    `kind` is "path" (name is the path as written), "demo", "hf" or "ms" (name is `org/name` on that hub) or "auto"
    (`org/name` with no hub named: a local directory of that name wins).
    """

    kind: RefKind
    name: str
    revision: str | None = None

    def at(self, revision: str | None) -> "ModelRef":
        """The same repository at another revision."""
        return replace(self, revision=revision)

    @classmethod
    def parse(cls, ref: str) -> "ModelRef":
        """Take `ref` apart by its spelling alone, without looking at the disk.

        Raises HubError for an empty reference, for `hf:` or `ms:` not followed by `org/name[@revision]`, and for a URL
        that is not the page of a model on a hub.
        """
        ref = ref.strip()
        if not ref:
            raise HubError(f"model reference: got an empty string; expected {FORMS}")
        if ref == "demo":
            return cls("demo", ref)
        if (page := model_page(ref)) is not None:
            at = f"@{page.revision}" if page.revision else ""
            ref = f"{page.hub}:{page.name}{at}"
        kind: RefKind = "auto"
        prefix, colon, rest = ref.partition(":")
        if colon and prefix in ("hf", "ms"):
            kind = "hf" if prefix == "hf" else "ms"
            ref = rest
        match = _REPOSITORY.fullmatch(ref)
        if kind == "auto" and (match is None or ref.endswith(WEIGHT_FILES)):
            return cls("path", ref)
        if match is None:
            written = f"{prefix}:{rest}"
            raise HubError(
                f"model reference: got {written!r}; expected {prefix}:org/name or {prefix}:org/name@revision; "
                "write the repository's full name"
            )
        return cls(kind, match["name"], match["revision"])
