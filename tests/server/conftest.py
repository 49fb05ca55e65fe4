"""One server over a tiny model, and one over the stub engine, for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_tokenizer import write_tokenizer
from openai import OpenAI
from serving import Server, stub_server

from rapid_infer.testing import TINY, make_checkpoint

VOCAB = 320
MAX_LEN = 512


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3Config

    sizes = {**TINY, "vocab_size": VOCAB, "max_position_embeddings": MAX_LEN}
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny"), Qwen3Config(**sizes, head_dim=16))
    write_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny model called "tiny", with room for 16 requests at once."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    options = ["--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32", "--max-num-seqs", "16"]
    options += ["--profile-dir", str(log.parent / "profiles")]
    server = Server(["-m", "rapid_infer.cli", "serve", str(checkpoint), *options], log)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Says what the last user message says, for ever where that is empty; a step takes a millisecond."""
    with stub_server(tmp_path_factory.mktemp("stub"), env={"STUB_STEP": "0.001"}) as server:
        yield server


@pytest.fixture(scope="session")
def stub_client(stub: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=stub.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client
