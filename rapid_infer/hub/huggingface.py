"""Hugging Face as a source, over the official client."""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rapid_infer.hub.entry import Algorithm, FileEntry, checked_entry
from rapid_infer.hub.reference import ModelRef
from rapid_infer.hub.source import SourceError, client_errors, endpoint_url

ENDPOINT = "https://huggingface.co"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_INFO_TIMEOUT = 10.0


class HuggingFace:
    """`endpoint`: a mirror; None takes $HF_ENDPOINT, else huggingface.co."""

    name = "huggingface"
    title = "Hugging Face"
    default_revision = "main"

    def __init__(self, endpoint: str | None = None) -> None:
        # The client reads its variable only when it is imported.
        self.endpoint = endpoint_url(endpoint, os.environ.get("HF_ENDPOINT"), ENDPOINT)

    def resolve(self, ref: ModelRef) -> str:
        with client_errors(self, ref):
            info = self._client().model_info(ref.name, revision=ref.revision, timeout=_INFO_TIMEOUT)
            if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
                raise SourceError(f"{self.title} ({self.endpoint}): {ref.name}: got commit {info.sha!r}")
            return info.sha

    def manifest(self, ref: ModelRef) -> list[FileEntry]:
        with client_errors(self, ref):
            tree = list(self._client().list_repo_tree(ref.name, recursive=True, revision=ref.revision))
            files = [self._entry(ref, item) for item in tree if hasattr(item, "blob_id")]
        if not files:
            raise SourceError(f"{self.title} ({self.endpoint}): {ref.name}@{ref.revision}: got an empty listing")
        return files

    def headers(self) -> Mapping[str, str]:
        from huggingface_hub.utils import build_hf_headers

        _no_telemetry()
        return build_hf_headers(library_name="rapid_infer")

    def _client(self) -> Any:
        from huggingface_hub import HfApi

        _no_telemetry()
        return HfApi(endpoint=self.endpoint, library_name="rapid_infer")

    def _entry(self, ref: ModelRef, item: Any) -> FileEntry:
        algorithm: Algorithm = "sha256" if item.lfs else "git-sha1"
        digest = item.lfs.sha256 if item.lfs else item.blob_id
        size = item.lfs.size if item.lfs else item.size
        url = f"{self.endpoint}/{ref.name}/resolve/{ref.revision}/{quote(item.path)}"
        return checked_entry(item.path, size, algorithm, digest, url)


def _no_telemetry() -> None:
    """Else the client asks huggingface.co, whatever `endpoint` is, how to describe who calls it."""
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
