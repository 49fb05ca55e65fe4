"""The provider from FlashInfer: what `supports` says, and the plan it makes, over a library that computes as told."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rapid_infer_ops_attention import installed, providers
from torch import Tensor

from rapid_infer.ops import OPS, OpInfo, load_providers
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.testing.op_cases.attention import make_metadata

load_providers()
assert "flashinfer" in providers.NAMES

OP = OPS["paged_attention"]
FITTING = {"head_dim": 128, "block_size": 64, "window": False, "soft_cap": False, "sinks": False, "return_lse": False}


def reasons(
    capability: tuple[int, int] = (9, 0), dtype: torch.dtype = torch.bfloat16, graphs: bool = False, **extra: Any
) -> str:
    info = OpInfo("cuda", dtype, capability, {**FITTING, **extra}, graphs)
    return "; ".join(OP.providers["flashinfer"].reasons(info))


def test_where_it_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    installed.folders.cache_clear()
    installed.has.cache_clear()
    try:
        assert reasons() == "flashinfer is not installed (pip install flashinfer-python)"
        installed.has.cache_clear()
        (tmp_path / "flashinfer" / "prefill.py").touch()
        assert reasons() == reasons((8, 0), torch.float16, window=True, soft_cap=True, return_lse=True) == ""
        assert reasons(graphs=True) == "waits for the device, which a CUDA graph cannot record: set enforce_eager=True"
        assert reasons((7, 5)) == "needs SM 80 or newer, this GPU is SM 75"
        assert reasons(head_dim=96) == "takes head sizes of 64, 128, 256, not 96"
        assert reasons(dtype=torch.float32) == "takes bfloat16 and float16, not float32"
        assert reasons(sinks=True) == "has no sinks"
    finally:
        installed.folders.cache_clear()
        installed.has.cache_clear()


class Wrapper:
    """Attention by what `plan` was told alone. Its signatures are those of flashinfer-python 0.6.14 and 0.7.4, as far
    as both have them.
    """

    plans = 0

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ) -> None:  # fmt: skip
        assert (float_workspace_buffer.dtype, kv_layout, backend) == (torch.uint8, "NHD", "auto")

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
        non_blocking=True,
    ) -> None:  # fmt: skip
        type(self).plans += 1
        for each in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert each.dtype is torch.int32
        assert causal
        self.told = SimpleNamespace(**{name: value for name, value in locals().items() if name != "self"})

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, return_lse: bool = False) -> Any:
        told = self.told
        assert (q.shape[1:], q.dtype) == ((told.num_qo_heads, told.head_dim_qk), told.q_data_type)
        assert paged_kv_cache[0].dtype is told.kv_data_type
        assert q.shape[0] == told.qo_indptr[-1]
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        group = told.num_qo_heads // told.num_kv_heads
        for row, last in enumerate(told.paged_kv_last_page_len.tolist()):
            begin, end = told.paged_kv_indptr[row : row + 2].tolist()
            start, stop = told.qo_indptr[row : row + 2].tolist()
            n = (end - begin - 1) * told.page_size + last
            pages = told.paged_kv_indices[begin:end].long()
            k, v = (cache[pages].flatten(0, 1)[:n].repeat_interleave(group, dim=1) for cache in paged_kv_cache)
            scores = torch.einsum("qhd,khd->qhk", q[start:stop], k) * told.sm_scale
            if told.logits_soft_cap:
                scores = told.logits_soft_cap * torch.tanh(scores / told.logits_soft_cap)
            position = torch.arange(n - (stop - start), n)[:, None, None]
            key = torch.arange(n)
            hidden = key > position
            if told.window_left >= 0:
                hidden = hidden | (key < position - told.window_left)
            scores = scores.masked_fill(hidden, -math.inf)
            out[start:stop] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
            lse[start:stop] = scores.logsumexp(-1) / math.log(2)
        return (out, lse) if return_lse else out


@pytest.fixture
def fn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    name = "rapid_infer_ops_attention.flashinfer.attention"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(Wrapper, "plans", 0)
    yield importlib.import_module(name).paged_attention
    sys.modules.pop(name, None)


def make(seed: int, seq_lens: list[int], query_lens: list[int], size: int = 16) -> dict[str, Any]:
    torch.manual_seed(seed)
    metadata, blocks = make_metadata(seq_lens, query_lens, size, "cpu")
    # The rows that take part are not the table's first ones.
    metadata.block_table = torch.cat((torch.full_like(metadata.block_table[:2], -1), metadata.block_table)).flip(0)
    metadata.rows = len(metadata.block_table) - 3 - metadata.rows
    k, v = torch.randn(2, blocks, size, 2, 64).unbind(0)
    q = torch.randn(sum(query_lens), 6, 96)[:, :4, :64]
    return {"q": q, "k_cache": k, "v_cache": v, "metadata": metadata}


@pytest.mark.parametrize(
    "variant",
    [{}, {"window": 1}, {"window": 20}, {"soft_cap": 3.0}, {"window": 5, "soft_cap": 2.0}],
    ids=lambda variant: "+".join(variant) or "plain",
)
@pytest.mark.parametrize(
    ("seq_lens", "query_lens"),
    [([1], [1]), ([16, 17, 1, 160], [1, 1, 1, 1]), ([5, 40, 32, 9, 70], [1, 1, 4, 9, 33])],
    ids=["one", "decode", "mixed"],
)
def test_the_plan_says_what_the_reference_does(fn: Any, variant: Any, seq_lens: list[int], query_lens: Any) -> None:
    assert list(inspect.signature(fn).parameters) == list(inspect.signature(OP.reference).parameters)
    kwargs, params = make(0, seq_lens, query_lens), AttentionParams(0.2, **variant, return_lse=True)
    out, lse = fn(**kwargs, params=params)
    expected, expected_lse = OP.reference(**kwargs, params=params)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    torch.testing.assert_close(fn(**kwargs, params=replace(params, return_lse=False)), expected)


def test_a_step_is_planned_once_for_layers_that_are_alike(fn: Any) -> None:
    first, second = make(1, [5, 40], [1, 4]), make(2, [6, 41], [1, 1])
    for step, plans in ((first, 2), (second, 4)):
        for _ in range(3):
            for window in (None, 7):
                params = AttentionParams(0.2, window)
                torch.testing.assert_close(fn(**step, params=params), OP.reference(**step, params=params))
        assert Wrapper.plans == plans
