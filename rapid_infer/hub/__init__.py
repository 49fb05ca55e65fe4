"""Where model files come from: a model reference goes in, a verified local directory comes out.

Sources are Hugging Face and ModelScope, whose official clients list, resolve revisions and authenticate; the bytes
come through one downloader of our own that resumes, hashes on the way and verifies. Nothing here imports torch.
"""

from rapid_infer.hub.cache import cache_dir, file_lock
from rapid_infer.hub.choose import Endpoints
from rapid_infer.hub.demo import resolve_demo
from rapid_infer.hub.download import Download
from rapid_infer.hub.entry import FileEntry
from rapid_infer.hub.reference import ModelRef
from rapid_infer.hub.resolve import fetch, resolve
from rapid_infer.hub.source import Source, SourceError
from rapid_infer.hub.verify import Finding, Verification, verify

__all__ = [
    "Download",
    "Endpoints",
    "FileEntry",
    "Finding",
    "ModelRef",
    "Source",
    "SourceError",
    "Verification",
    "cache_dir",
    "fetch",
    "file_lock",
    "resolve",
    "resolve_demo",
    "verify",
]
