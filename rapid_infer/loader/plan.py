"""The load plan: every copy that fills this rank's parameters, settled and checked before a byte of weights is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from rapid_infer.errors import WeightError
from rapid_infer.layers.parameter import Elsewhere, Part, Placement, parts_of, placement_of
from rapid_infer.loader.computed import why_computed
from rapid_infer.loader.copies import Copy
from rapid_infer.loader.coverage import ParameterCoverage, cover_parameters, find_overlaps, written_region
from rapid_infer.loader.diagnosis import LoadDiagnosis
from rapid_infer.loader.headers import TensorInfo
from rapid_infer.loader.index_map import IndexMap, Section, Shape, chain, is_scalar, sliced_shape
from rapid_infer.loader.inventory import Inventory
from rapid_infer.loader.kv_scales import KVScales
from rapid_infer.loader.problems import Kind, Problem, format_problems, summarize_problems
from rapid_infer.loader.rules import Ignored, Target
from rapid_infer.loader.ties import give_own_parameter, same_values, tied_names
from rapid_infer.loader.weight_map import TIED, WeightMap
from rapid_infer.quant.stored import KV_SCALES

CASTABLE = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
"""Types that may be cast into one another."""
BYTES = frozenset({torch.uint8, torch.int8, torch.float8_e8m0fnu})
"""Types whose bytes files call by each other's names. Any other type must match exactly."""


@dataclass(frozen=True)
class LoadPlan:
    """What `load_weights` will do on this rank, or why it cannot."""

    directory: Path
    model: str
    copies: tuple[Copy, ...]
    """In the order of files and of data within a file."""
    ignored: dict[str, str]
    """Checkpoint tensors that are not wanted, each with the reason."""
    untied: tuple[str, ...]
    """Checkpoint tensors that got a parameter of their own, because they differ from what the model tied them to."""
    elsewhere: tuple[str, ...]
    """Checkpoint tensors that are wholly another rank's: its experts, the layers of its pipeline stage."""
    problems: tuple[Problem, ...]
    causes: tuple[str, ...]
    """Likely causes of the problems, each with what to do."""
    unscaled: tuple[str, ...]
    """Attention with a quantized cache for which the checkpoint has no scales, or not both."""
    bytes_to_read: int
    """Bytes that this rank reads; other ranks' shards and experts are not among them."""

    def names(self, kind: Kind) -> list[str]:
        """Names with a problem of `kind`: parameters for MISSING and PARTLY_FILLED, else checkpoint tensors."""
        return [problem.name for problem in self.problems if problem.kind is kind]

    def check(self) -> None:
        """WeightError with every problem in full and the likely causes, unless the checkpoint fills the model."""
        if self.problems:
            head = f"{self.directory} does not fill {self.model}: {summarize_problems(self.problems)}"
            raise WeightError(
                "\n".join([head, format_problems(self.problems), *(f"likely cause: {text}" for text in self.causes)])
            )


def plan_load(model: nn.Module, weight_map: WeightMap, inventory: Inventory) -> LoadPlan:
    """Finds a home for every tensor of `inventory` in `model`, whose parameters may be on the meta device.

    Reads no weights but those of ties, and raises nothing for a checkpoint that does not fit: call `check` on the
    result. Every parameter counts, a shared one once; buffers take no weights. Where a checkpoint holds both tensors of
    a tie and they differ, the source gets a parameter of its own in `model`.
    """
    return _Planner(model, weight_map, inventory).run()


@dataclass
class _Planner:
    model: nn.Module
    weight_map: WeightMap
    inventory: Inventory
    copies: list[Copy] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    untied: list[str] = field(default_factory=list)
    remote: dict[str, None] = field(default_factory=dict)
    """Tensors of which a piece is another rank's."""
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules(remove_duplicate=False))
        self.kv_scales = KVScales(self.modules)
        self.coverage = cover_parameters(self.model)
        self.tied = tied_names(self.modules, self.weight_map.ties)
        self.absent = frozenset(path for path, module in self.modules.items() if isinstance(module, Elsewhere))

    def run(self) -> LoadPlan:
        repeats = [info for info in self.inventory.tensors.values() if not self._place(info)]
        self._place_repeats(repeats)
        self._find_overlaps()
        self._find_gaps()
        order = {file: position for position, file in enumerate(self.inventory.files)}
        self.copies.sort(key=lambda copy: (order[copy.info.file], copy.info.offset))
        return LoadPlan(
            directory=self.inventory.directory,
            model=type(self.model).__name__,
            copies=tuple(self.copies),
            ignored=self.ignored,
            untied=tuple(self.untied),
            elsewhere=self._elsewhere(),
            problems=tuple(self.problems),
            causes=tuple(self._diagnosis().likely_causes()) if self.problems else (),
            unscaled=tuple(self.kv_scales.without()),
            bytes_to_read=sum(copy.nbytes() for copy in self.copies),
        )

    def _place(self, info: TensorInfo) -> bool:
        """Plans one tensor; False when it repeats a tied parameter and is left for later."""
        resolved = self.weight_map.resolve(info.name, self.tied)
        if resolved is TIED:
            return False
        if isinstance(resolved, Ignored):
            self.ignored[info.name] = resolved.why
            return True
        for target in resolved:
            self._place_target(info, target)
        return True

    def _place_repeats(self, repeats: list[TensorInfo]) -> None:
        """Tensors of tie sources: each fills what nothing else does, is skipped where it says the same, else unties."""
        targets = {info.name: self._untied_targets(info) for info in repeats}
        twice = [(info, target) for info in repeats for target in targets[info.name] if self._filled(target)]
        for info, target in twice:
            if target.name in self.tied and not self._repeats(info, target):
                self._untie(info, target)
        same = {target.name for _, target in twice if target.name in self.tied}
        for info in repeats:
            wanted = [target for target in targets[info.name] if target.name not in same]
            if not wanted:
                self.ignored[info.name] = TIED.why
            for target in wanted:
                self._place_target(info, target)

    def _untied_targets(self, info: TensorInfo) -> list[Target]:
        targets = self.weight_map.resolve(info.name)
        assert not isinstance(targets, Ignored), f"{info.name} is tied, and so has a target"
        return targets

    def _repeats(self, info: TensorInfo, target: Target) -> bool:
        """Whether `info` holds the values that fill the tied parameter already."""
        try:
            pieces = self._pieces(target, target.index.shape(info.shape) if target.index else info.shape)
        except ValueError:
            return False
        mine = [Copy(info, placement, index) for _, index, placement in pieces if placement is not None]
        return all(any(same_values(copy, other, self.inventory) for other in self.copies) for copy in mine)

    def _untie(self, info: TensorInfo, target: Target) -> None:
        module = self.modules[target.path]
        param = give_own_parameter(module, target.leaf)
        self.coverage[id(param)] = ParameterCoverage(target.name, param, tuple(parts_of(module, target.leaf)))
        self.tied -= {target.name}
        self.untied.append(info.name)

    def _place_target(self, info: TensorInfo, target: Target) -> None:
        try:
            shape = target.index.shape(info.shape) if target.index else info.shape
            pieces = self._pieces(target, shape)
        except KeyError:
            if self._is_absent(target.path):
                self.remote[info.name] = None
                return
            if self._place_kv_scale(info, target):
                return
            module = self.modules.get(target.path)
            why = why_computed(info) or getattr(module, "ignored", {}).get(target.leaf)
            if why is None:
                self.problems.append(Problem(Kind.UNEXPECTED, info.name, self._why_homeless(target)))
            else:
                self.ignored[info.name] = why
            return
        except ValueError as error:
            self.problems.append(Problem(Kind.SHAPE, info.name, f"{error}, for {target.name}", info.shape))
            self._mark_filled(target, target.part, info)
            return
        for part, index, placement in pieces:
            self._place_piece(info, target, part, index, placement)

    def _place_kv_scale(self, info: TensorInfo, target: Target) -> bool:
        if target.leaf not in KV_SCALES:
            return False
        try:
            placements = self.kv_scales.find(info, target.path)
        except ValueError as error:
            self.problems.append(Problem(Kind.SHAPE, info.name, str(error)))
            return True
        self.copies += (Copy(info, placement) for placement in placements)
        return bool(placements)

    def _pieces(self, target: Target, shape: Shape) -> list[tuple[Part, IndexMap | None, Placement | None]]:
        """The pieces that `target` fills: one, or all parts when the checkpoint merges what the module keeps apart."""
        module = self.modules[target.path]
        try:
            return [(target.part, target.index, placement_of(module, target.leaf, target.part, target.expert))]
        except KeyError:
            parts = parts_of(module, target.leaf) if target.part is None else ()
            if len(parts) < 2:
                raise
        placements = [placement_of(module, target.leaf, part, target.expert) for part in parts]
        here = [placement for placement in placements if placement is not None]
        if not here:
            return [(part, None, None) for part in parts]
        if len(here) < len(parts):
            raise KeyError(target.leaf)  # the size of a part that is kept elsewhere is not known here
        sections = _cut_sections([placement.shape for placement in here], shape)
        return [(part, chain(target.index, cut), placement) for part, cut, placement in zip(parts, sections, here)]

    def _place_piece(
        self, info: TensorInfo, target: Target, part: Part, index: IndexMap | None, placement: Placement | None
    ) -> None:
        if placement is None:
            self.remote[info.name] = None
            self._mark_filled(target, part, info)
            return
        coverage = self.coverage.get(id(placement.param))
        assert coverage, f"the layer at {target.path} places {target.leaf} in a parameter it does not register"
        rival = coverage.add_piece(_slot(placement, target.expert), part, target.expert, info.name)
        where = coverage.name if part is None else f"{coverage.name}[{part}]"
        shape = index.shape(info.shape) if index else info.shape
        wanted, dtype = placement.shape, placement.param.dtype
        if rival is not None:
            self.problems.append(Problem(Kind.TWICE, info.name, f"{where} is already filled by {rival}"))
            return
        fits = shape == wanted or (is_scalar(shape) and is_scalar(wanted))
        casts = info.dtype == dtype or {info.dtype, dtype} <= CASTABLE or {info.dtype, dtype} <= BYTES
        if placement.store is not None:
            casts = info.dtype in CASTABLE
        if not fits:
            detail = f"checkpoint {list(shape)}, model {list(wanted)} for {where}"
            self.problems.append(Problem(Kind.SHAPE, info.name, detail, shape, wanted))
        if not casts:
            detail = f"checkpoint {_dtype_name(info.dtype)}, model {_dtype_name(dtype)} for {where}"
            self.problems.append(Problem(Kind.DTYPE, info.name, detail))
        if fits and casts:
            if placement.store is None:
                _assert_consistent(placement, where)
            self.copies.append(Copy(info, placement, index))

    def _is_absent(self, path: str) -> bool:
        """Whether the module there, or one that it is in, is another stage's."""
        names = path.split(".")
        return any(".".join(names[:depth]) in self.absent for depth in range(1, len(names) + 1))

    def _elsewhere(self) -> tuple[str, ...]:
        here = {copy.info.name for copy in self.copies} | {problem.name for problem in self.problems}
        return tuple(name for name in self.remote if name not in here)

    def _mark_filled(self, target: Target, part: Part, info: TensorInfo) -> None:
        """Notes a piece that another rank keeps, or that has been reported, so that it does not count as absent."""
        coverage = self._coverage_of(target)
        if coverage is not None and target.expert is None:
            coverage.add_piece(None, part, None, info.name)

    def _coverage_of(self, target: Target) -> ParameterCoverage | None:
        module = self.modules.get(target.path)
        param = module._parameters.get(target.leaf) if module is not None else None
        return self.coverage[id(param)] if param is not None else None

    def _filled(self, target: Target) -> bool:
        coverage = self._coverage_of(target)
        return coverage is not None and bool(coverage.filled)

    def _find_overlaps(self) -> None:
        for rival, copy in find_overlaps(self.copies):
            name = self.coverage[id(copy.placement.param)].name
            detail = (
                f"writes {_describe_region(copy)} of {name}, and {rival.info.name} writes {_describe_region(rival)}"
            )
            self.problems.append(Problem(Kind.OVERLAP, copy.info.name, detail))

    def _find_gaps(self) -> None:
        for coverage in self.coverage.values():
            missing = coverage.missing_pieces()
            if missing and not coverage.filled:
                self.problems.append(Problem(Kind.MISSING, coverage.name))
            elif missing:
                detail = f"lacks {coverage.describe_pieces(missing)}"
                self.problems.append(Problem(Kind.PARTLY_FILLED, coverage.name, detail))

    def _why_homeless(self, target: Target) -> str:
        """Why a target does not exist in the model."""
        module = self.modules.get(target.path)
        if module is None:
            return f"the model has no module {target.path}"
        if target.leaf in module._buffers:
            return f"{target.name} is a buffer, and buffers take no weights: ignore it in the weight map"
        if module._parameters.get(target.leaf) is None:
            return f"{type(module).__name__} has no parameter {target.leaf}"
        piece = "the whole" if target.part is None else f"piece {target.part}"
        expert = "" if target.expert is None else f" of expert {target.expert}"
        return f"{type(module).__name__} does not take {piece}{expert} of {target.name}"

    def _diagnosis(self) -> LoadDiagnosis:
        def fits(name: str) -> bool:
            targets = self.weight_map.resolve(name, self.tied)
            if isinstance(targets, Ignored):
                return targets is TIED
            return all(self._coverage_of(target) is not None and not self._filled(target) for target in targets)

        names = tuple(coverage.name for coverage in self.coverage.values())
        return LoadDiagnosis(tuple(self.problems), self.inventory.tensors, names, self.weight_map.ties, fits)


def _cut_sections(parts: list[Shape], whole: Shape) -> list[Section] | list[None]:
    """Index maps that cut `whole` into pieces of shapes `parts`. ValueError when no dimension allows it.

    One value for parts that want one each is every part's; they may also be a vector.
    """
    if not any(parts):
        if is_scalar(whole):
            return [None] * len(parts)
        if whole == (len(parts),):
            return [Section((1,) * len(parts), piece) for piece in range(len(parts))]
    for dim in range(len(whole)):
        sizes = tuple(part[dim] for part in parts if len(part) == len(whole))
        if parts == [(*whole[:dim], size, *whole[dim + 1 :]) for size in sizes] and sum(sizes) == whole[dim]:
            return [Section(sizes, piece, dim) for piece in range(len(parts))]
    raise ValueError(f"checkpoint {list(whole)} cannot be cut into parts of shapes {[list(part) for part in parts]}")


def _slot(placement: Placement, expert: int | None) -> int | None:
    """Which expert of the parameter a placement fills; None when it does not single one out."""
    if expert is None or not placement.target:
        return None
    first = placement.target[0]
    if isinstance(first, int):
        return first
    start, stop, _ = first.indices(placement.param.shape[0])
    return start if stop - start == 1 else None


def _assert_consistent(placement: Placement, where: str) -> None:
    """A region of another shape would be filled by broadcasting, silently."""
    taken = sliced_shape(placement.source, placement.shape)
    put = sliced_shape(placement.target, tuple(placement.param.shape))
    assert taken == put, f"the layer that owns {where} takes {list(taken)} of the tensor for a region of {list(put)}"


def _describe_region(copy: Copy) -> str:
    """The region that a copy writes: "[4:6, 0:2]", or "all"."""
    bounds = written_region(copy)
    if bounds == tuple((0, size) for size in copy.placement.param.shape):
        return "all"
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
