"""Ranks that are started once for each number of them and take one model after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_models import MODELS

from rapid_infer.executors import multi_process
from rapid_infer.executors.rank_group import RankGroup
from rapid_infer.executors.rank_messages import Done, Unload
from rapid_infer.executors.rank_process import CHECK_HIDDEN
from rapid_infer.testing import TINY, make_checkpoint

class SharedRanks(RankGroup):
    """Closing a model's executor unloads the model; `end` ends the ranks."""

    def close(self, grace: float = 4.0) -> None:
        if self.failed or grace == 0:
            super().close(0)
        else:
            self.drain()
            self.send(Unload())
            self.answers(Done)

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("llama", num_key_value_heads=3)`: one of MODELS, made once for equal arguments."""
    made: dict[str, Path] = {}

    def make(name: str, **changes: Any) -> Path:
        from transformers import AutoConfig

        key = repr((name, sorted(changes.items())))
        if key not in made:
            model_type, sizes = MODELS[name]
            # All heads have keys of their own where nothing else is said.
            kv = {"num_key_value_heads": sizes.get("num_attention_heads", 4)}
            config = AutoConfig.for_model(model_type, **{**TINY, **kv, **sizes, **changes})
            made[key] = make_checkpoint(tmp_path_factory.mktemp(name), config)
        return made[key]

    return make


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[Callable[[int], SharedRanks]]:
    """`shared_ranks(n)`: n ranks on the CPU, started on first use, anew where they have been ended."""
    started: dict[int, SharedRanks] = {}

    def get(size: int) -> SharedRanks:
        if size not in started or started[size].failed:
            with pytest.MonkeyPatch.context() as patch:
                # Hidden states of all ranks are compared too.
                patch.setenv(CHECK_HIDDEN, "1")
                started[size] = SharedRanks(size, ["cpu"] * size, threads=1)
        return started[size]

    yield get
    for ranks in started.values():
        ranks.end()


@pytest.fixture
def on_shared_ranks(shared_ranks: Callable[[int], SharedRanks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines over several ranks use those that are there."""
    monkeypatch.setattr(
        multi_process, "start_ranks", lambda config: shared_ranks(config.parallel.tensor_parallel_size)
    )


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
