"""Pipeline stages of plugins' models: each loads its share of a checkpoint, and in a row they are the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rapid_infer.layers.batch import ForwardBatch
from rapid_infer.layers.context import BuildContext
from rapid_infer.loader.inventory import Inventory
from rapid_infer.loader.load import load_weights
from rapid_infer.loader.plan import plan_load
from rapid_infer.models.checkpoint import read_checkpoint
from rapid_infer.ops import OpResolver
from rapid_infer.parallel import ParallelState
from rapid_infer.registry import ModelRegistry
from rapid_infer.testing.op_cases.attention import make_metadata
from rapid_infer.worker.build import allocate_caches


def stage(path: Any, rank: int, size: int) -> tuple[Any, tuple[str, ...]]:
    """The stage's model, and the checkpoint's tensors that it leaves to others."""
    checkpoint = read_checkpoint(path)
    cls: Any = ModelRegistry.resolve(checkpoint.architecture)
    parallel = ParallelState(pp_rank=rank, pp_size=size)
    ctx = BuildContext(torch.float32, OpResolver("cpu"), 64, parallel, block_size=16)
    model = cls(cls.read_config(checkpoint.hf_config), ctx)
    plan = plan_load(model, model.weight_map, Inventory.scan(path))
    load_weights(model, model.weight_map, path)
    allocate_caches(model, 8, 16, "cpu")
    return model, plan.elsewhere


@pytest.mark.parametrize("name", ["llama", "qwen3", "mla"])
def test_two_stages_load_and_run_as_the_whole_model(name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name).path
    (whole, none), (first, later), (last, earlier) = (stage(path, *place) for place in ((0, 1), (0, 2), (1, 2)))
    assert none == ()
    assert {key.split(".")[2] for key in later if ".layers." in key} == {"1"}
    assert "model.norm.weight" in later
    assert ("model.embed_tokens.weight" in earlier) == (name != "qwen3")  # its head is tied to it
    metadata, _ = make_metadata([7], [7], 16, "cpu")
    ids = torch.arange(3, 10)
    asked = torch.tensor([6])

    def run(model: Any, received: Any = None) -> Any:
        metadata.plans.clear()
        return model(ForwardBatch(ids, torch.arange(7), [metadata], received=received, logits_indices=asked))

    torch.testing.assert_close(run(last, run(first)), run(whole))
