"""ModelScope as a source, over the official client."""

import hashlib
import logging
import os
from collections.abc import Mapping
from typing import Any

from rapid_infer.hub.entry import FileEntry, checked_entry
from rapid_infer.hub.reference import ModelRef
from rapid_infer.hub.source import SourceError, client_errors, endpoint_url

ENDPOINT = "https://www.modelscope.cn"


class ModelScope:
    """`endpoint`: another site; None takes $MODELSCOPE_ENDPOINT or $MODELSCOPE_DOMAIN, else www.modelscope.cn.

    Its client tells no commit, so the "commit" of a revision is a digest over all paths, sizes and SHA-256 sums: equal
    exactly when all files are. Bytes are asked for under the revision's name.
    """

    name = "modelscope"
    title = "ModelScope"
    default_revision = "master"

    def __init__(self, endpoint: str | None = None) -> None:
        named = (os.environ.get(variable) for variable in ("MODELSCOPE_ENDPOINT", "MODELSCOPE_DOMAIN"))
        self.endpoint = endpoint_url(endpoint, *named, ENDPOINT)
        self._listings: dict[tuple[str, str], list[FileEntry]] = {}
        self._api: Any = None

    def resolve(self, ref: ModelRef) -> str:
        revision = ref.revision or self.default_revision
        with client_errors(self, ref):
            client = self._client()
            listed = client.list_repo_files(ref.name, "model", revision=revision)
            files = [self._entry(client, ref.name, revision, item) for item in listed if item.type != "tree"]
        if not files:
            # The service answers an unknown revision with an empty success.
            raise SourceError(
                f"{self.title} ({self.endpoint}): {ref.name}@{revision}: got an empty listing; no such revision"
            )
        lines = sorted(f"{entry.digest} {entry.size} {entry.path}" for entry in files)
        commit = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:40]
        self._listings[ref.name, commit] = files
        return commit

    def manifest(self, ref: ModelRef) -> list[FileEntry]:
        files = self._listings.get((ref.name, ref.revision or ""))
        if files is None:
            raise SourceError(f"{self.title}: {ref.name}@{ref.revision} was not resolved before")
        return files

    def headers(self) -> Mapping[str, str]:
        token = self._client().legacy.token
        # Older parts of the service know only the cookie.
        return {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}

    def _client(self) -> Any:
        client_logger = logging.getLogger("modelscope_hub")
        if not client_logger.handlers:
            # Else the client adds one that prints to stderr, and keeps its log from the application's handlers.
            client_logger.addHandler(logging.NullHandler())
        from modelscope_hub import HubApi
        from modelscope_hub.config import HubConfig

        if self._api is None:
            self._api = HubApi(HubConfig(endpoint=self.endpoint))
        return self._api

    def _entry(self, client: Any, repo: str, revision: str, item: Any) -> FileEntry:
        url = client.legacy.get_download_url(repo, "model", item.path, revision)
        return checked_entry(item.path, item.size, "sha256", item.sha256, url)
