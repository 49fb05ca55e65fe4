"""Weights without a checkpoint: random, the same for the same parameter name, never constant."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from rapid_infer.loader.plan import CASTABLE

CHUNK = 1 << 22
"""Values that are made at a time, so that formats which need a detour through fp32 take little extra memory."""
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def load_dummy(model: nn.Module, *, scale: float = 0.02) -> None:
    """Fills every parameter of `model` in place with normal(0, scale); `finalize(model)` is left to the caller.

    Seeded by the parameter's dotted name alone, so values depend neither on order nor on other parameters; a shared
    parameter counts once, under its first name. Vectors named `*norm*.weight` are 1; integers are uniform over their
    type. What a weight format stores is made as it says (`ParamSpec.dummy`), so that its matrices are such weights.
    """
    with torch.no_grad():
        for name, param in model.named_parameters():
            assert not param.is_meta, f"{name} is still on the meta device"
            generator = _generator(name, param.device)
            path, _, leaf = name.rpartition(".")
            spec = getattr(model.get_submodule(path), "specs", {}).get(leaf)
            if _is_norm(name, param):
                param.data.fill_(1)
            elif spec is not None and spec.dummy is not None:
                _fill_made(param.data, generator, spec.dummy)
            else:
                _fill(param.data, generator, scale)


def _is_norm(name: str, param: nn.Parameter) -> bool:
    *path, leaf = name.split(".")
    return param.dim() == 1 and leaf == "weight" and bool(path) and "norm" in path[-1]


def _generator(name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def _fill(values: torch.Tensor, generator: torch.Generator, scale: float) -> None:
    # A parameter that is a view with gaps has no flat view; it is filled in one go.
    chunks = values.view(-1).split(CHUNK) if values.is_contiguous() else (values,)
    for chunk in chunks:
        _fill_chunk(chunk, generator, scale)


def _fill_made(values: torch.Tensor, generator: torch.Generator, make: Callable[..., torch.Tensor]) -> None:
    def noise(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=values.device).normal_(generator=generator)

    for chunk in values.view(-1).split(CHUNK):
        chunk.copy_(make(noise, tuple(chunk.shape)))


def _fill_chunk(chunk: torch.Tensor, generator: torch.Generator, scale: float) -> None:
    dtype = chunk.dtype
    if dtype in CASTABLE:
        chunk.normal_(0, scale, generator=generator)
    elif dtype == torch.float4_e2m1fn_x2:
        chunk.view(torch.uint8).random_(0, 256, generator=generator)
    elif dtype.is_floating_point:
        noise = torch.empty(chunk.shape, dtype=torch.float32, device=chunk.device)
        chunk.copy_(noise.normal_(0, scale, generator=generator))
    elif dtype == torch.bool:
        chunk.random_(0, 2, generator=generator)
    else:
        _fill_integers(chunk, generator)


def _fill_integers(chunk: torch.Tensor, generator: torch.Generator) -> None:
    # Random bits are random bits; the wide unsigned types lack the operation.
    chunk = chunk.view(SIGNED.get(chunk.dtype, chunk.dtype))
    info = torch.iinfo(chunk.dtype)
    chunk.random_(info.min, info.max, generator=generator)
