"""Where the pieces of a matrix that is merged of parts, cut over ranks and repeated for experts lie in its parameters.

Written once for every layer that multiplies by a weight: linear layers, experts, vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rapid_infer.errors import ConfigError
from rapid_infer.layers.context import BuildContext
from rapid_infer.layers.parameter import Part, Placement
from rapid_infer.parallel.state import split
from rapid_infer.quant.param_spec import Dim, ParamSpec


@dataclass(frozen=True)
class Shard:
    """What this rank holds of a part of a matrix's features: `local` of the checkpoint's `size`, from `start` on."""

    name: Part
    size: int
    local: int
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.local

    def entries(self, dim: Dim) -> slice:
        """The entries along `dim` of the part's tensor that this rank keeps; at both ends a group may be cut in two."""
        if dim.whole:
            return slice(0, dim.count(self.size))
        first = dim.entry(self.start, self.size)
        return slice(first, dim.entry(self.stop - 1, self.size) + 1 if self.local else first)

    def check(self, dim: Dim, what: str) -> None:
        """ConfigError when the cut runs through values that are stored together; `what` names the parameter."""
        group = dim.group or self.size
        between_values = self.start % group == 0 and (self.stop % group == 0 or self.stop == self.size)
        if between_values or dim.whole or not dim.packed:
            return
        part = "" if self.name is None else f" of part {self.name}"
        fits = [n for n in range(1, 65) if self.size % n == 0 and self.size // n % group == 0]
        raise ConfigError(
            f"{what} stores {group} {dim.over} features{part} in one value, and this rank's share, {self.start} to "
            f"{self.stop} of {self.size}, does not begin and end between two values; use a tensor_parallel_size that "
            f"leaves a multiple of {group} to each rank, one of {fits or [1]}"
        )


def whole(name: Part, size: int) -> Shard:
    return Shard(name, size, size, 0)


def cut(ctx: BuildContext, name: Part, size: int, what: str = "output features") -> Shard:
    """An even cut: rank r of n has features `r * size / n ...`."""
    local = ctx.parallel.split(size, f"{ctx.name} {what}")
    return Shard(name, size, local, ctx.parallel.tp_rank * local)


def cut_expert(ctx: BuildContext, name: Part, size: int, what: str) -> Shard:
    """The same over the ranks that keep the same experts."""
    parallel = ctx.parallel
    local = split(size, parallel.expert_tp_size, f"{ctx.name} {what}", "tensor_parallel_size / expert_parallel_size")
    return Shard(name, size, local, parallel.expert_tp_rank * local)


@dataclass(frozen=True)
class MatrixLayout:
    """A matrix `[out, in]`: its output features part after part, its input features, and what this rank has of each."""

    outs: tuple[Shard, ...]
    ins: Shard

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(shard.name for shard in self.outs)

    @property
    def local_out(self) -> int:
        return sum(shard.local for shard in self.outs)

    def alone(self) -> MatrixLayout:
        """What this rank has as if it were all there is: groups are counted from where it begins."""
        return MatrixLayout(tuple(whole(shard.name, shard.local) for shard in self.outs), whole(None, self.ins.local))

    def shape(self, spec: ParamSpec, what: str) -> tuple[int, ...]:
        """Shape of this rank's parameter `what`. ConfigError when a cut runs through packed values."""
        return tuple(self._size(dim, what) for dim in spec.dims)

    def parameter(self, spec: ParamSpec, what: str, *leading: int) -> nn.Parameter:
        """This rank's parameter `what`, uninitialised, `[*leading, *shape]`. ConfigError as `shape`."""
        empty = torch.empty((*leading, *self.shape(spec, what)), dtype=spec.dtype)
        return nn.Parameter(empty, requires_grad=False)

    def _size(self, dim: Dim, what: str) -> int:
        if dim.over == "part":
            return len(self.outs)
        if dim.over == "value":
            return dim.group or 0
        shards = self._shards(dim)
        for shard in shards:
            shard.check(dim, what)
        return sum(_length(shard.entries(dim)) for shard in shards)

    def placement(self, param: nn.Parameter, spec: ParamSpec, part: Part) -> Placement:
        """Where the checkpoint's tensor of `part` goes in `param`, made of `shape`. KeyError: no such part."""
        if part not in self.parts:
            raise KeyError(part)
        index = self.parts.index(part)
        shape: list[int] = []
        source: list[slice] = []
        target: list[slice | int] = []
        for dim in spec.dims:
            if dim.over == "part":
                target.append(index)
                continue
            if dim.over == "value":
                every = slice(0, dim.group)
                shape.append(dim.group or 0)
                source.append(every)
                target.append(every)
                continue
            before, shard = (self.outs[:index], self.outs[index]) if dim.over == "output" else ((), self.ins)
            kept, offset = shard.entries(dim), sum(_length(other.entries(dim)) for other in before)
            shape.append(dim.count(shard.size))
            source.append(kept)
            target.append(slice(offset, offset + _length(kept)))
        return Placement(param, tuple(shape), tuple(source), tuple(target), spec.check)

    def entries(self, dim: Dim) -> Tensor:
        """Which entry along `dim` of a parameter belongs to each local feature: int64 `[local_out]` or `[ins.local]`.

        With the dims of a scale, `scale[layout.entries(rows)][:, layout.entries(columns)]` has the weight's shape.
        """
        found: list[Tensor] = []
        offset = 0
        for index, shard in enumerate(self._shards(dim)):
            if dim.over == "part":
                found.append(torch.full((shard.local,), index))
                continue
            kept = shard.entries(dim)
            of_part = [dim.entry(feature, shard.size) for feature in range(shard.start, shard.stop)]
            found.append(torch.tensor(of_part, dtype=torch.int64) + (offset - kept.start))
            offset += _length(kept)
        return torch.cat(found)

    def _shards(self, dim: Dim) -> tuple[Shard, ...]:
        return (self.ins,) if dim.over == "input" else self.outs


@dataclass(frozen=True)
class ExpertAxis:
    """The leading dimension of a parameter that holds a matrix of each expert.

    `expert_map[e]` is where expert e is kept (logical to physical), below zero when another rank has it.
    """

    expert_map: tuple[int, ...]

    @property
    def local(self) -> int:
        """How many experts this rank keeps."""
        return sum(slot >= 0 for slot in self.expert_map)

    def placement(self, one: Placement, expert: int | None) -> Placement | None:
        """`one` is where an expert's tensor would go without this dimension; `expert` None: a tensor of all experts.

        None when another rank has it. KeyError: no such expert, or all experts, of which those kept here are not in
        order and side by side.
        """
        if expert is None:
            run = self._run()
            every = slice(0, self.local)
            return replace(
                one, shape=(len(self.expert_map), *one.shape), source=(run, *one.source), target=(every, *one.target)
            )
        if expert >= len(self.expert_map):
            raise KeyError(f"expert {expert} of {len(self.expert_map)}")
        slot = self.expert_map[expert]
        return None if slot < 0 else replace(one, target=(slot, *one.target))

    def _run(self) -> slice:
        """The experts kept here, which must stand in order and side by side to be read from one tensor."""
        here = [expert for expert, slot in enumerate(self.expert_map) if slot >= 0]
        run = slice(here[0], here[-1] + 1)
        if list(self.expert_map[run]) != list(range(len(here))):
            raise KeyError("experts out of order")
        return run


def _length(cut: slice) -> int:
    return cut.stop - cut.start
