"""The fake hubs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import Cdn, HuggingFaceHub, ModelScopeHub
from hub_model import Hubs


@pytest.fixture
def hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hubs]:
    """Fake hubs that the environment names, an empty cache, and no trace of the user's own clients."""
    made = Hubs(HuggingFaceHub(), ModelScopeHub(), Cdn())
    settings = {
        "HF_ENDPOINT": made.hf.url,
        "MODELSCOPE_ENDPOINT": made.ms.url,
        "RAPID_INFER_CACHE": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hf-home"),
        "MODELSCOPE_HOME": str(tmp_path / "ms-home"),
        "MODELSCOPE_CACHE": str(tmp_path / "ms-cache"),
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    tokens = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MODELSCOPE_API_TOKEN")
    caches = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    for name in ("RAPID_INFER_HUB", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", *tokens, *caches):
        monkeypatch.delenv(name, raising=False)
    yield made
    for server in (made.hf, made.ms, made.cdn):
        server.close()
