"""Many tokens at a time in one program: the same as the reference, with tokens left over at the end."""

from __future__ import annotations

import pytest
import torch

from rapid_infer.ops import OPS

pytest.importorskip("triton")

from rapid_infer.ops.providers.triton.attention import rope_kv_write
from rapid_infer.testing.op_cases import cases_of, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [2, 4])
def test_tokens_at_once(dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_kv_write, "MANY_TOKENS", 1)
    monkeypatch.setattr(rope_kv_write, "AT_ONCE", at_once)
    torch.manual_seed(0)
    op = OPS["qk_norm_rope_kv_write"]
    for case in cases_of(op, dtype, DEVICE):
        assert case.kwargs["qkv"].shape[0] % at_once
        check(op, "triton", case, dtype)
