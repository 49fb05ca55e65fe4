"""Providers from FlashAttention libraries: what `supports` says, and the arguments a library is called with."""

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rapid_infer_ops_attention import installed, providers
from rapid_infer_ops_attention.flash_attn import plan

from rapid_infer.layers.attention import Attention
from rapid_infer.layers.context import BuildContext
from rapid_infer.ops import OPS, OpInfo, OpResolver, load_providers
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.testing.op_cases.attention import make_metadata

load_providers()

NAMES = tuple(name for name in providers.NAMES if "flash_attn" in name)
FITTING = {"head_dim": 128, "block_size": 64, "window": False, "soft_cap": False, "sinks": False, "return_lse": False}


def reasons(name: str, capability: tuple[int, int] = (9, 0), dtype: torch.dtype = torch.bfloat16, **extra: Any) -> str:
    info = OpInfo("cuda", dtype, capability, {**FITTING, **extra})
    return "; ".join(OPS["paged_attention"].providers[name].supports(info))


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all libraries were there."""
    monkeypatch.setattr(installed, "folders", lambda package: (Path(package),))
    monkeypatch.setattr(installed, "has", lambda package, pattern: True)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "folders", lambda package: ())
    monkeypatch.setattr(installed, "has", lambda package, pattern: False)


@pytest.mark.usefixtures("absent")
def test_a_missing_library_is_the_reason() -> None:
    assert reasons("vllm_flash_attn") == "vllm is not installed"
    assert reasons("flash_attn_4") == "flash-attn-4 is not installed"
    assert reasons("flash_attn", block_size=256) == "flash-attn is not installed"


def test_libraries_are_found_by_their_files_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm" / "vllm_flash_attn").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "interface.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("vllm", "flash_attn"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    installed.folders.cache_clear()
    installed.has.cache_clear()
    try:
        assert reasons("vllm_flash_attn") == "the installed vllm has no FlashAttention 3"
        assert reasons("flash_attn_4") == ""
        assert reasons("flash_attn", block_size=256) == "flash-attn is not installed"
        installed.has.cache_clear()
        (tmp_path / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").touch()
        assert reasons("vllm_flash_attn") == ""
    finally:
        installed.folders.cache_clear()
        installed.has.cache_clear()


@pytest.mark.usefixtures("all_installed")
def test_what_each_version_can_run() -> None:
    assert reasons("vllm_flash_attn") == reasons("flash_attn_4") == ""
    assert reasons("vllm_flash_attn", window=True, soft_cap=True, sinks=True) == ""
    assert reasons("flash_attn_4", capability=(10, 0), return_lse=True, sinks=True) == ""
    assert reasons("flash_attn", capability=(8, 0), block_size=256) == ""
    assert "needs SM 90, this GPU is SM 80" in reasons("vllm_flash_attn", capability=(8, 0))
    assert "this GPU is SM 120" in reasons("flash_attn_4", capability=(12, 0))
    assert reasons("flash_attn") == "takes pages of a multiple of 256 tokens, not 64: set block_size=256"
    assert reasons("flash_attn", block_size=256, sinks=True) == "has no sinks"
    assert "log-sum-exp counts the sinks" in reasons("vllm_flash_attn", sinks=True, return_lse=True)
    assert reasons("vllm_flash_attn", dtype=torch.float16, sinks=True) == "rounds sinks to bfloat16"
    for name in NAMES:
        assert "not float32" in reasons(name, dtype=torch.float32)
        assert "not 36" in reasons(name, head_dim=36)
        assert "not None" in reasons(name, block_size=None)


@pytest.mark.usefixtures("all_installed")
def test_facts_of_a_device_alone_know_no_layer() -> None:
    info = OpInfo("cuda", torch.bfloat16, (9, 0))
    assert [OPS["paged_attention"].providers[name].supports(info) for name in NAMES] == [[], [], []]


@pytest.mark.usefixtures("all_installed")
def test_pages_that_would_be_loaded_whole_are_refused() -> None:
    for name in NAMES[:2]:
        assert reasons(name, block_size=128) == "takes pages of a multiple of 16 tokens below 80, not 128"
        assert reasons(name, block_size=24) == "takes pages of a multiple of 16 tokens below 80, not 24"
        assert reasons(name, head_dim=256) == ""
        assert "below 64, not 64" in reasons(name, head_dim=256, window=True)


def test_a_layer_binds_with_the_block_size() -> None:
    seen: list[OpInfo] = []
    ops = OpResolver("cpu")
    ctx = BuildContext(torch.float32, ops, 64, block_size=16)
    bind = ops.bind

    def note(name: str, dtype: torch.dtype, **extra: Any) -> Any:
        seen.append(OpInfo.of("cpu", dtype, **extra))
        return bind(name, dtype, **extra)

    ops.bind = note  # type: ignore[method-assign]
    Attention(ctx, 2, 1, 16, rope=None)
    assert [info.extra["block_size"] for info in seen if "window" in info.extra] == [16]


def test_the_step_is_derived_once() -> None:
    metadata, _ = make_metadata([7, 40, 9], [1, 1, 4], 16, "cpu")
    metadata.rows = torch.tensor([2, 0, 1])
    table, start = plan.block_table(metadata), plan.key_start(metadata)
    assert table.equal(metadata.block_table[[2, 0, 1]])
    assert start.tolist() == [0, 7, 47, 56]
    assert (table.dtype, start.dtype) == (torch.int32, torch.int32)
    assert plan.block_table(metadata) is table
    assert plan.key_start(metadata) is start


# Signatures of the published libraries: vllm 0.26.0, flash-attn-4 4.0.0b36, flash-attn 2.8.3.
def vllm_function(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
    q_descale=None, k_descale=None, v_descale=None, num_splits=0, output_scale=None, fa_version=2, s_aux=None,
    cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None, mask_mod=None, aux_tensors=None, dynamic_causal=None,
):  # fmt: skip
    raise NotImplementedError


def version_4_function(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    raise NotImplementedError


def version_2_function(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    raise NotImplementedError


LIBRARIES = {
    "version_3": ("vllm.vllm_flash_attn", vllm_function),
    "version_4": ("flash_attn.cute", version_4_function),
    "version_2": ("flash_attn", version_2_function),
}


@pytest.fixture(params=LIBRARIES)
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The provider over a library that notes its arguments, which must fit the published signature by keyword."""
    name, published = LIBRARIES[request.param]
    noted = SimpleNamespace(version=request.param, arguments=None)

    def flash_attn_varlen_func(**kwargs: Any) -> Any:
        noted.arguments = inspect.signature(published).bind(**kwargs).arguments
        out, lse = kwargs["q"], torch.zeros(kwargs["q"].shape[1], kwargs["q"].shape[0])
        wants = any(kwargs.get(key) for key in ("return_lse", "return_softmax_lse", "return_attn_probs"))
        if request.param == "version_4":
            return out, lse if wants else None
        return ((out, lse) if request.param == "version_3" else (out, lse, None)) if wants else out

    parts = name.split(".")
    for i in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), ModuleType(".".join(parts[: i + 1])))
    sys.modules[name].flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module = f"rapid_infer_ops_attention.flash_attn.{request.param}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    loaded = importlib.import_module(module)
    if request.param == "version_4":
        monkeypatch.setattr(loaded, "_num_splits", lambda device: 1)
    noted.fn = loaded.paged_attention
    yield noted
    sys.modules.pop(module, None)


def test_the_library_is_called_as_published(fake: SimpleNamespace) -> None:
    assert list(inspect.signature(fake.fn).parameters) == list(
        inspect.signature(OPS["paged_attention"].reference).parameters
    )
    metadata, blocks = make_metadata([7, 40, 9], [1, 1, 4], 16, "cpu")
    k, v = torch.randn(2, blocks, 16, 2, 32).unbind(0)
    q = torch.randn(6, 4, 32)
    assert fake.fn(q, k, v, metadata, AttentionParams(0.5)) is q
    given = fake.arguments
    assert (given["softmax_scale"], given["causal"], given["softcap"]) == (0.5, True, 0.0)
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (4, 40)
    assert given["cu_seqlens_q"] is metadata.query_start
    assert given.get("window_size") in (None, (-1, -1), (None, None))
    sinks = None if fake.version == "version_2" else torch.randn(4)
    out, lse = fake.fn(q, k, v, metadata, AttentionParams(0.5, 6, 3.0, sinks, True))
    assert out is q
    assert lse.shape == (6, 4)
    assert lse.is_contiguous()
    given = fake.arguments
    assert tuple(given["window_size"]) == (5, 0)
    assert given["softcap"] == 3.0
    if fake.version == "version_3":
        assert given["s_aux"].dtype is torch.bfloat16
        assert given["fa_version"] == 3
