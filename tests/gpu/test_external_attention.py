"""Attention providers from installed libraries give the reference's attention, whatever lies in unused slots."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from rapid_infer_ops_attention.providers import NAMES
from torch import Tensor

from rapid_infer import LLM, SamplingParams
from rapid_infer.ops import OPS, OpInfo, load_providers
from rapid_infer.ops.attention_metadata import AttentionMetadata
from rapid_infer.ops.attention_params import AttentionParams
from rapid_infer.testing.op_cases import Case, cases_of
from rapid_infer.testing.op_cases.attention import make_metadata
from rapid_infer.testing.tiny import TINY, make_checkpoint

load_providers()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OP = OPS["paged_attention"]
DTYPES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: {"atol": 4e-2, "rtol": 4e-2}, torch.float16: {"atol": 5e-3, "rtol": 5e-3}}
# Rows of one token first: short, at and around the ends of pages and tiles, and long enough to be split.
BATCHES = {
    "decode": ([1, 63, 64, 65, 127, 128, 129, 1000, 5000], [1] * 9),
    "prefill": ([5, 64, 200, 1500], [5, 64, 200, 1500]),
    "chunk": ([300, 1024, 2000], [44, 512, 300]),
    "mixed": ([7, 700, 64, 300, 1100], [1, 1, 1, 65, 300]),
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 100},
    {"soft_cap": 20.0},
    {"sinks": True},
    {"return_lse": True},
    {"window": 33, "soft_cap": 15.0, "sinks": True},
)


def usable(name: str, dtype: torch.dtype, extra: dict[str, Any], cuda_graphs: bool = False) -> Any:
    """The provider's function; skips with its reasons where it cannot run."""
    if reasons := OP.providers[name].reasons(OpInfo.of("cuda", dtype, cuda_graphs=cuda_graphs, **extra)):
        pytest.skip("; ".join(reasons))
    return OP.providers[name].fn


def block_size(name: str) -> int:
    return 256 if name == "flash_attn" else 64


def case(name: str, dtype: torch.dtype, batch: str, dim: int = 128, **variant: Any) -> Case:
    seq_lens, query_lens = BATCHES[batch]
    size, heads, kv_heads = block_size(name), 8, 2
    metadata, blocks = make_metadata(seq_lens, query_lens, size, "cuda")
    if variant.get("sinks"):
        variant["sinks"] = torch.randn(heads, device="cuda")
    params = AttentionParams(dim**-0.5, **variant)
    q = torch.randn(sum(query_lens), heads, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(blocks, size, kv_heads, dim, device="cuda", dtype=dtype) for _ in range(2))
    kwargs = {"q": q, "k_cache": k, "v_cache": v, "metadata": metadata, "params": params}
    return Case(kwargs, {"head_dim": dim, "block_size": size, **params.options()})


def reference(kwargs: dict[str, Any]) -> Any:
    wide = {n: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in kwargs.items()}
    return OP.reference(**wide)


def close(got: Any, want: Any, dtype: torch.dtype) -> None:
    assert isinstance(got, tuple) == isinstance(want, tuple)
    for have, expected in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want))):
        assert have.shape == expected.shape
        torch.testing.assert_close(have.float(), expected, **TOLERANCE[dtype])


def poison(kwargs: dict[str, Any]) -> dict[str, Any]:
    """NaN in every slot that belongs to no key of a row."""
    metadata: AttentionMetadata = kwargs["metadata"]
    size = kwargs["k_cache"].shape[1]
    used = torch.zeros(kwargs["k_cache"].shape[:2], dtype=torch.bool, device="cuda")
    for row, n in zip(metadata.rows.tolist(), metadata.seq_lens.tolist()):
        position = torch.arange(n, device="cuda")
        used[metadata.block_table[row, position // size].long(), position % size] = True
    unused = ~used[:, :, None, None]
    return {**kwargs, **{name: kwargs[name].masked_fill(unused, torch.nan) for name in ("k_cache", "v_cache")}}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_generic_inputs(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ran, reasons = 0, set()
    for one in cases_of(OP, dtype, "cuda"):
        why_not = OP.providers[name].supports(OpInfo.of("cuda", dtype, **one.extra))
        reasons.update(why_not)
        if not why_not:
            close(OP.providers[name].fn(**one.kwargs), reference(one.kwargs), dtype)
            ran += 1
    if not ran:
        pytest.skip("; ".join(sorted(reasons)))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "+".join(variant) or "plain")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_batches_of_an_engine(name: str, batch: str, variant: dict[str, Any]) -> None:
    torch.manual_seed(1)
    one = case(name, torch.bfloat16, batch, **variant)
    fn = usable(name, torch.bfloat16, one.extra)
    close(fn(**one.kwargs), reference(one.kwargs), torch.bfloat16)


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_what_lies_beyond_a_row_does_not_matter(name: str, batch: str, dim: int) -> None:
    torch.manual_seed(2)
    one = case(name, torch.bfloat16, batch, dim)
    fn = usable(name, torch.bfloat16, one.extra)
    want = reference(one.kwargs)
    close(fn(**poison(one.kwargs)), want, torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_step_follows_its_tensors(name: str) -> None:
    """In a CUDA graph with the bounds of the longest step there can be, replayed with other lengths and rows."""
    torch.manual_seed(3)
    one = case(name, torch.bfloat16, "decode")
    fn = usable(name, torch.bfloat16, one.extra, cuda_graphs=True)
    kwargs = one.kwargs
    longest = kwargs["metadata"].block_table.shape[1] * block_size(name)
    metadata = dataclasses.replace(kwargs["metadata"], max_seq_len=longest, plans={})
    kwargs = {**kwargs, "metadata": metadata}
    fn(**kwargs)
    metadata.plans.clear()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn(**kwargs)
    for _ in range(3):
        metadata.seq_lens.copy_(torch.randint(1, longest + 1, metadata.seq_lens.shape, dtype=torch.int32))
        metadata.rows.copy_(torch.randperm(len(metadata.rows)))
        kwargs["q"].normal_()
        graph.replay()
        close(out, reference(kwargs), torch.bfloat16)


@pytest.mark.parametrize("name", NAMES)
def test_the_user_chooses_it(name: str) -> None:
    extra = {"head_dim": 128, "block_size": block_size(name)}
    info = OpInfo.of("cuda", torch.bfloat16, **extra)
    usable(name, torch.bfloat16, extra)
    assert OP.bind(info, [name]).provider == name


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_runs_on_it(name: str, tmp_path: Path) -> None:
    """Prompts in chunks beside decoding rows: what it wrote scores as high in fp32 on the CPU."""
    from transformers import Qwen3Config

    usable(name, torch.float16, {"head_dim": 64, "block_size": block_size(name)})
    model = str(make_checkpoint(tmp_path, Qwen3Config(**TINY, head_dim=64)))
    prompts = [[(7 * i + j) % 199 for j in range(3 + 23 * i)] for i in range(9)]
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0)
    options = {"op_priority": {"paged_attention": [name]}, "block_size": block_size(name), "enforce_eager": True}
    with LLM(
        model, skip_tokenizer_init=True, dtype="float16", device="cuda", max_num_batched_tokens=64, **options
    ) as llm:
        wrote = [output.outputs[0] for output in llm.generate(prompts, params)]
    texts = [prompt + completion.token_ids for prompt, completion in zip(prompts, wrote)]
    with LLM(model, skip_tokenizer_init=True, dtype="float32", device="cpu") as llm:
        scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for text, completion, output in zip(texts, wrote, scored):
        assert completion.logprobs
        assert output.prompt_logprobs
        assert len(completion.token_ids) == 20
        got = [at[token].logprob for at, token in zip(completion.logprobs, completion.token_ids)]
        want = [at[token].logprob for at, token in zip(output.prompt_logprobs[-20:], text[-20:]) if at]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), atol=2e-2, rtol=0)
