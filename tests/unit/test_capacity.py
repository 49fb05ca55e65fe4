"""What does not fit into memory is refused before it is allocated, with the numbers; what fits never is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rapid_infer import LLM, device
from rapid_infer.cache.budget import GIB
from rapid_infer.cache.spec import CacheGroup, FullKV
from rapid_infer.config import CheckpointInfo, DeviceInfo, EngineArgs, EngineConfig
from rapid_infer.errors import ConfigError
from rapid_infer.layers.embedding import LMHead
from rapid_infer.models.checkpoint import Checkpoint, read_checkpoint
from rapid_infer.ops import OPS
from rapid_infer.ops.registry import Provider
from rapid_infer.registry import ModelRegistry
from rapid_infer.testing import TINY, make_checkpoint
from rapid_infer.worker import capacity
from rapid_infer.worker.build import build_model, plan_cache
from rapid_infer.worker.capacity import Room, check_memory, memory_need, refuses_out_of_memory
from rapid_infer.worker.memory import MemoryProfile

MIB = 1 << 20
UNLIMITED = 9223372036854771712
HALF = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("tiny")
    return read_checkpoint(make_checkpoint(path, LlamaConfig(**TINY, tie_word_embeddings=True)))


def resolved(kind: str = "cpu", **options: Any) -> EngineConfig:
    args = EngineArgs(**{"dtype": "float32", "block_size": 16, **options})
    return args.resolve(CheckpointInfo(512, "float32"), DeviceInfo(kind, True, 0))


# --- what the host can give -------------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1000 MiB available; tests add the cgroups."""
    monkeypatch.setattr(device, "PROC", tmp_path / "proc")
    monkeypatch.setattr(device, "CGROUPS", tmp_path / "cgroup")
    write(tmp_path, {"proc/meminfo": f"MemTotal: {2000 << 10} kB\nMemFree: 1 kB\nMemAvailable: {1000 << 10} kB"})
    return tmp_path


def v2(limit: object, used: int, cached: int = 0) -> dict[str, object]:
    stat = f"anon 5\ninactive_file {cached // 2}\nactive_file {cached - cached // 2}\nslab_reclaimable 0"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def v1(limit: int, used: int, cached: int) -> dict[str, object]:
    stat = f"inactive_file 1\ntotal_inactive_file {cached}\ntotal_active_file 0"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {}, 1000 * MIB),
        ("0::/", {"": v2(300 * MIB, 100 * MIB)}, 200 * MIB),
        ("0::/", {"": v2(300 * MIB, 290 * MIB, 90 * MIB)}, 100 * MIB),
        ("0::/", {"": v2("max", 100 * MIB)}, 1000 * MIB),
        ("0::/", {"": v2(9000 * MIB, 100 * MIB)}, 1000 * MIB),
        ("0::/a/b", {"a": v2(300 * MIB, 100 * MIB), "a/b": v2("max", 90 * MIB)}, 200 * MIB),
        ("0::/a/b", {"a": v2(300 * MIB, 100 * MIB), "a/b": v2(100 * MIB, 90 * MIB)}, 10 * MIB),
        ("0::/not/mounted/here", {"": v2(300 * MIB, 100 * MIB)}, 200 * MIB),
        ("0::/", {"": v2(300 * MIB, 400 * MIB)}, 1),
        ("4:memory:/x\n0::/", {"memory/x": v1(300 * MIB, 200 * MIB, 50 * MIB)}, 150 * MIB),
        ("4:memory:/docker/x", {"memory": v1(300 * MIB, 200 * MIB, 50 * MIB)}, 150 * MIB),
        ("4:memory:/x", {"memory/x": v1(UNLIMITED, 200 * MIB, 0)}, 1000 * MIB),
        ("2:cpu:/x", {"memory/x": v1(300 * MIB, 200 * MIB, 0), "x": v2(1, 0)}, 1000 * MIB),
    ],
)
def test_memory_is_what_the_machine_and_every_cgroup_leave(
    host: Path, groups: str, files: dict[str, dict[str, object]], expected: int
) -> None:
    write(host, {"proc/self/cgroup": groups})
    for folder, content in files.items():
        write(host / "cgroup" / folder, content)
    assert device.available_host_memory() == expected
    assert device.host_memory_limit() == expected


def test_where_the_system_does_not_tell_nothing_is_refused_that_the_machine_could_hold(host: Path) -> None:
    (host / "proc/meminfo").unlink()
    assert device.available_host_memory() == HALF
    assert HALF * 2 <= device.host_memory_limit() <= HALF * 2 + 1


# --- what a model needs -----------------------------------------------------------------------------------------------


def test_needs_are_counted_from_shapes(checkpoint: Checkpoint) -> None:
    cls, config = ModelRegistry.resolve(checkpoint.architecture), resolved(max_model_len=100, max_num_seqs=3)
    model = build_model(cls, checkpoint, config, "meta").model
    need = memory_need(model, 199, config, Room(GIB, ""))
    real = build_model(cls, checkpoint, config, "cpu").model
    assert need.weights == sum(param.untyped_storage().nbytes() for param in real.parameters())
    page = 2 * 16 * 2 * 2 * 16 * 4
    # 7 blocks of 16 tokens and one for padding; 3 rows and the padding row with 7 blocks each.
    assert (need.cache, need.tables) == (8 * page, 4 * 7 * 4)
    # The widest input is down_proj's, of 96 values; not more tokens than three rows of that length.
    assert (need.tokens, need.step) == (300, 300 * 96 * 4)
    assert need.total == need.weights + need.cache + need.tables + need.step
    assert memory_need(model, 10**6, config, Room(GIB, "")).step == 3 * 10**6 * 4
    assert memory_need(model, 199, config, Room(5 * page, "")).tokens == 4 * 16
    auto = memory_need(model, 199, resolved(), Room(GIB, ""))
    assert (auto.cache, auto.tokens) == (2 * page, 512)
    assert memory_need(model, 199, resolved(kv_cache_memory_bytes=7 * page), Room(GIB, "")).cache == 7 * page


def test_a_packed_head_counts_as_the_second_copy_it_is(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, config = ModelRegistry.resolve(checkpoint.architecture), resolved()
    model = build_model(cls, checkpoint, config, "meta").model
    before = memory_need(model, 199, config, Room(GIB, "")).weights
    monkeypatch.setattr(LMHead, "packed_bytes", 1000)
    assert memory_need(model, 199, config, Room(GIB, "")).weights == before + 1000
    assert memory_need(model, 199, replace(config, device="cuda"), Room(GIB, "")).weights == before


@pytest.mark.parametrize("op", ["scores", "best"])
def test_packed_bytes_are_those_of_distinct_layouts(checkpoint: Checkpoint, op: str) -> None:
    head = build_model(ModelRegistry.resolve(checkpoint.architecture), checkpoint, resolved(), "cpu").model.head
    head.quant.scores.prepare = head.quant.best.prepare = None
    assert head.packed_bytes == 0
    getattr(head.quant, op).prepare = torch.clone
    assert head.packed_bytes == head.weight.nbytes
    head.quant.scores.prepare = head.quant.best.prepare = torch.clone
    assert head.packed_bytes == head.weight.nbytes
    head.finalize_weights()
    assert sum(copy.nbytes for copy in head.quant.packed.values()) == head.packed_bytes


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_needs_one_byte_more_than_there_is_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls, config = ModelRegistry.resolve(checkpoint.architecture), resolved()
    model = build_model(cls, checkpoint, config, "meta").model
    total = memory_need(model, 199, config, Room(GIB, "")).total
    monkeypatch.setattr(capacity, "host_memory_limit", lambda: total)
    check_memory(cls, checkpoint, config)
    monkeypatch.setattr(capacity, "host_memory_limit", lambda: total - 1)
    with pytest.raises(ConfigError, match="does not fit into memory"):
        check_memory(cls, checkpoint, config)


@pytest.mark.parametrize(
    ("options", "limit", "texts"),
    [
        ({}, 1000, ["0.28 MiB for weights in float32", "0.00 MiB of this machine's memory", "dtype='bfloat16'"]),
        ({"kv_cache_memory_bytes": 2 * GIB}, GIB, ["2.00 GiB for the KV cache (kv_cache_memory_bytes)", "or less"]),
        ({"max_model_len": 512}, MIB // 2, ["max_model_len=512", "Try dtype='bfloat16'", "a lower max_model_len"]),
        (
            {"max_num_seqs": 100_000, "max_num_batched_tokens": 100_000},
            32 * MIB,
            ["12.21 MiB for tables of max_num_seqs=100000", "at least 49.74 MiB for a step of 65520 tokens", "Try"],
        ),
    ],
)
def test_the_refusal_has_the_numbers_and_comes_before_any_weight(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], limit: int, texts: list[str]
) -> None:
    def build_on_meta(cls: Any, checkpoint: Checkpoint, config: EngineConfig, where: Any) -> Any:
        assert str(where) == "meta"
        return build_model(cls, checkpoint, config, where)

    monkeypatch.setattr(capacity, "host_memory_limit", lambda: limit)
    monkeypatch.setattr("rapid_infer.worker.build.build_model", build_on_meta)
    with pytest.raises(ConfigError) as caught:
        LLM(str(checkpoint.path), device="cpu", dtype="float32", skip_tokenizer_init=True, **options)
    message = str(caught.value)
    assert message.startswith("LlamaForCausalLM does not fit into memory: it needs ")
    for text in texts:
        assert text in message


def test_a_cache_too_small_for_one_request_is_refused_before_the_weights_are_read(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rapid_infer.worker.build.load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="too small for one request of max_model_len=512"):
        LLM(
            str(checkpoint.path),
            device="cpu",
            skip_tokenizer_init=True,
            max_model_len=512,
            kv_cache_memory_bytes=60_000,
        )


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 60 * GIB),
        ({"gpu_memory_utilization": 0.5}, 20 * GIB),
        ({"gpu_memory_utilization": 0.1}, 0),
        ({"gpu_memory_utilization": 1.0}, 70 * GIB),
        ({"kv_cache_memory_bytes": 1}, 70 * GIB),
    ],
)
def test_the_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], limit: int) -> None:
    """100 GiB, of which 66 are free and 4 are torch's to use again."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (66 * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 * GIB)
    room = Room.of(resolved("cuda", **options))
    assert abs(room.limit - limit) <= 1
    assert "70.00 GiB of the GPU's 100.00 GiB are free" in room.words
    assert ("gpu_memory_utilization" in room.words) == (limit < 70 * GIB)


def test_a_gpu_that_is_full_says_so(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "of", lambda config: Room(1000, "none is free"))
    with pytest.raises(ConfigError, match=r"none is free.* a higher gpu_memory_utilization, ending other processes"):
        check_memory(ModelRegistry.resolve(checkpoint.architecture), checkpoint, resolved("cuda"))


def test_providers_that_only_a_gpu_has_may_be_pinned(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "of", lambda config: Room(GIB, "a lot is free"))
    gpu_only = Provider("paged_attention", "gpu_only", 1, lambda info: ["is elsewhere"], lambda: None)
    monkeypatch.setitem(OPS["paged_attention"].providers, "gpu_only", gpu_only)
    config = resolved("cuda", op_priority={"paged_attention": ["gpu_only"]})
    check_memory(ModelRegistry.resolve(checkpoint.architecture), checkpoint, config)


GROUPS = [CacheGroup(FullKV(1, 16, "float32"), 1)]
FULL = MemoryProfile(total=GIB, utilization=0.9, weights=GIB // 2, other=0, step=GIB // 4, graphs=GIB // 4)


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ["too small for one request", "0.50 for weights and tables, 0.25 for the largest step"]),
        ({"kv_cache_memory_bytes": GIB // 4 + 1}, [f"kv_cache_memory_bytes={GIB // 4 + 1} is more", str(GIB // 4)]),
    ],
)
def test_what_a_gpu_was_measured_to_need_is_part_of_the_refusal(options: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_cache(resolved("cuda", **options), GROUPS, FULL)
    for text in [*texts, "max_num_batched_tokens", "gpu_memory_utilization 0.9"]:
        assert text in str(caught.value)


def test_a_cache_that_just_fits_beside_what_was_measured_is_taken() -> None:
    plan, _ = plan_cache(resolved("cuda", kv_cache_memory_bytes=GIB // 4), GROUPS, FULL)
    assert plan.total_bytes == GIB // 4


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
        (ConfigError("another"), False),
    ],
)
def test_running_out_of_memory_at_the_start_is_a_config_error(error: Exception, refused: bool) -> None:
    @refuses_out_of_memory
    def start(self: object) -> None:
        raise error

    with pytest.raises(ConfigError if refused else type(error)) as caught:
        start(None)
    assert (caught.value is error) is not refused
    if refused:
        assert "max_num_batched_tokens" in str(caught.value)
