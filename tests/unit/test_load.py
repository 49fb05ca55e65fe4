"""Loading: the values on every rank equal slices of the whole tensors, whatever the files, types and layout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rapid_infer.errors import WeightError
from rapid_infer.layers.parameter import Placement
from rapid_infer.loader.index_map import interleave, transpose
from rapid_infer.loader.load import load_weights
from rapid_infer.loader.progress import terminal_bar
from rapid_infer.loader.rules import experts, rename, split, stack, tie
from rapid_infer.loader.weight_map import WeightMap

HIDDEN, EXPERTS, VOCAB = 8, 4, 10
QKV_ROWS = {"q": 16, "k": 8, "v": 8}
TABLE = WeightMap(
    [
        experts(("gate_proj", "up_proj"), "gate_up_proj"),
        stack(("q_proj", "k_proj", "v_proj"), "qkv_proj", parts=("q", "k", "v")),
        tie("lm_head", "embed"),
    ]
)


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    # NaN shows what was never written.
    filler = float("nan") if dtype.is_floating_point and dtype.itemsize > 1 else 0
    return nn.Parameter(torch.full(shape, filler, dtype=dtype), requires_grad=False)


def share(total: int, rank: int, ranks: int) -> slice:
    return slice(rank * total // ranks, (rank + 1) * total // ranks)


class Merged(nn.Module):
    """Parts one above the other, each cut over the ranks by rows; a weight and a bias."""

    def __init__(self, rows: dict, columns: int, rank: int, ranks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, self.columns, self.rank, self.ranks = rows, columns, rank, ranks
        self.weight = parameter(sum(rows.values()) // ranks, columns, dtype=dtype)
        self.bias = parameter(sum(rows.values()) // ranks, dtype=dtype)

    def parts(self, leaf: str) -> tuple:
        return tuple(self.rows)

    def placement(self, leaf: str, part=None, expert: int | None = None) -> Placement | None:
        param, rows = self._parameters[leaf], self.rows[part]
        if expert is not None:
            raise KeyError(expert)
        names = list(self.rows)
        start = sum(self.rows[name] for name in names[: names.index(part)]) // self.ranks
        shape = (rows, self.columns)[: param.ndim]
        return Placement(
            param, shape, (share(rows, self.rank, self.ranks),), (slice(start, start + rows // self.ranks),)
        )


class RowCut(nn.Module):
    """A matrix cut over the ranks by columns."""

    def __init__(self, rows: int, columns: int, rank: int, ranks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.full, self.cut = (rows, columns), share(columns, rank, ranks)
        self.weight = parameter(rows, columns // ranks, dtype=dtype)

    def parts(self, leaf: str) -> tuple:
        return (None,)

    def placement(self, leaf: str, part=None, expert: int | None = None) -> Placement | None:
        if (leaf, part, expert) != ("weight", None, None):
            raise KeyError(leaf)
        return Placement(self.weight, self.full, (slice(None), self.cut))


class Experts(nn.Module):
    """All experts on every rank, each part cut by rows."""

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank, self.ranks, self.local = rank, ranks, 6 // ranks
        self.weight = parameter(EXPERTS, 12 // ranks, HIDDEN, dtype=dtype)

    def parts(self, leaf: str) -> tuple:
        return (0, 1)

    def placement(self, leaf: str, part=None, expert: int | None = None) -> Placement | None:
        if part is None:
            raise KeyError(part)
        source, target = share(6, self.rank, self.ranks), slice(part * self.local, (part + 1) * self.local)
        if expert is None:
            return Placement(self.weight, (EXPERTS, 6, HIDDEN), (slice(None), source), (slice(None), target))
        return Placement(self.weight, (6, HIDDEN), (source,), (expert, target))


class Model(nn.Module):
    def __init__(self, rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float32, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.lm_head, self.norm = nn.Module(), nn.Module(), nn.Module()
        self.embed.weight = parameter(VOCAB, HIDDEN, dtype=dtype)
        self.lm_head.weight = self.embed.weight if tied else parameter(VOCAB, HIDDEN, dtype=dtype)
        self.norm.weight = parameter(HIDDEN)
        self.qkv_proj = Merged(QKV_ROWS, HIDDEN, rank, ranks, dtype)
        self.o_proj = RowCut(HIDDEN, 16, rank, ranks, dtype)
        self.experts = nn.Module()
        self.experts.gate_up_proj = Experts(rank, ranks, dtype)


def checkpoint(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    for part, rows in QKV_ROWS.items():
        shapes |= {f"{part}_proj.weight": (rows, HIDDEN), f"{part}_proj.bias": (rows,)}
    shapes["o_proj.weight"] = (HIDDEN, 16)
    for source in ("gate", "up"):
        shapes |= {f"experts.{expert}.{source}_proj.weight": (6, HIDDEN) for expert in range(EXPERTS)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def expected(tensors: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1) -> dict[str, torch.Tensor]:
    """What the parameters must hold, from whole tensors under their plain names."""

    def rows(name: str) -> torch.Tensor:
        return tensors[name][share(len(tensors[name]), rank, ranks)]

    out = {name: tensors[name] for name in ("embed.weight", "lm_head.weight", "norm.weight")}
    for leaf in ("weight", "bias"):
        out[f"qkv_proj.{leaf}"] = torch.cat([rows(f"{part}_proj.{leaf}") for part in "qkv"])
    out["o_proj.weight"] = tensors["o_proj.weight"][:, share(16, rank, ranks)]
    both = [[rows(f"experts.{expert}.{source}_proj.weight") for source in ("gate", "up")] for expert in range(EXPERTS)]
    out["experts.gate_up_proj.weight"] = torch.stack([torch.cat(pair) for pair in both])
    return out


def check(model: nn.Module, want: dict[str, torch.Tensor]) -> None:
    held = dict(model.named_parameters(remove_duplicate=False))
    assert held.keys() == want.keys()
    for name, param in held.items():
        assert torch.equal(param, want[name].to(param.dtype)), name


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    homes = {}
    for number, name in enumerate(tensors):
        homes[name] = f"model-{number % 3}.safetensors"
    for shard in set(homes.values()):
        save_file({name: tensors[name] for name, home in homes.items() if home == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def save_bin(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


# --- files, ranks and types -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [save, save_sharded, save_bin])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_gets_its_slices_from_every_kind_of_file(tmp_path: Path, write, ranks: int) -> None:
    tensors = checkpoint()
    write(tmp_path, tensors)
    for rank in range(ranks):
        model = Model(rank, ranks)
        report = load_weights(model, TABLE, tmp_path)
        check(model, expected(tensors, rank, ranks))
        assert report.bytes_read == sum(p.nbytes for p in model.parameters())
        assert report.num_tensors == len(tensors)
        assert report.ignored == {}
        assert report.seconds > 0


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("wanted", FLOATS)
@pytest.mark.parametrize("write", [save, save_bin])
def test_casts(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, write) -> None:
    tensors = checkpoint(stored)
    write(tmp_path, tensors)
    model = Model(1, 2, wanted)
    load_weights(model, TABLE, tmp_path)
    assert model.o_proj.weight.dtype == wanted
    assert model.norm.weight.dtype == torch.float32
    check(model, expected(tensors, 1, 2))


PACKED = (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.int32, torch.uint8)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("write", [save, save_bin])
def test_packed_types_are_copied_bit_by_bit(tmp_path: Path, dtype: torch.dtype, write) -> None:
    whole = torch.randint(0, 256, (8, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).view(dtype)
    write(tmp_path, {"weight": whole})
    columns = whole.shape[1]
    for rank in range(2):
        layer = RowCut(8, columns, rank, 2, torch.uint8)
        empty = torch.zeros(8, columns // 2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        layer.weight = nn.Parameter(empty, requires_grad=False)
        load_weights(layer, WeightMap(), tmp_path)
        want = whole[:, share(columns, rank, 2)].contiguous()
        assert torch.equal(layer.weight.data.view(torch.uint8), want.view(torch.uint8))


def test_scalars(tmp_path: Path) -> None:
    model = nn.Module()
    model.a, model.b, model.c = parameter(), parameter(1), parameter(2)
    save(tmp_path, {"a": torch.tensor([2.0]), "b": torch.tensor(3.0), "c": torch.tensor([4.0, 5.0])})
    load_weights(model, WeightMap(), tmp_path)
    assert (model.a.item(), model.b.tolist(), model.c.tolist()) == (2.0, [3.0], [4.0, 5.0])


def test_a_scalar_that_the_layer_calls_a_vector(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = parameter(3)

        def parts(self, leaf: str) -> tuple:
            return ("q", "k", "v")

        def placement(self, leaf: str, part=None, expert=None) -> Placement:
            position = self.parts(leaf).index(part)
            return Placement(self.scale, (1,), (slice(0, 1),), (slice(position, position + 1),))

    model = nn.Module()
    model.qkv_proj = Scale()
    tensors = {"q_proj.scale": torch.tensor(1.0), "k_proj.scale": torch.tensor([2.0]), "v_proj.scale": torch.ones(1, 1)}
    save(tmp_path, tensors)
    load_weights(model, TABLE, tmp_path)
    assert model.qkv_proj.scale.tolist() == [1.0, 2.0, 1.0]


def test_tied(tmp_path: Path) -> None:
    tensors = checkpoint()
    tensors["lm_head.weight"] = tensors["embed.weight"].clone()
    model = Model(tied=True)
    save(tmp_path, tensors)
    report = load_weights(model, TABLE, tmp_path)
    assert (report.ignored, report.untied) == ({"lm_head.weight": "tied"}, ())
    assert model.lm_head.weight is model.embed.weight
    check(model, expected(tensors))
    save(tmp_path, {name: tensor for name, tensor in tensors.items() if name != "embed.weight"})
    model = Model(tied=True)
    load_weights(model, TABLE, tmp_path)
    assert torch.equal(model.embed.weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("write", [save, save_sharded, save_bin])
@pytest.mark.parametrize("chunk", [1, 3 * 4 * HIDDEN, 1 << 26])
def test_a_tie_of_tensors_that_differ_in_one_value_is_undone(
    tmp_path: Path, write, chunk: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rapid_infer.loader.ties.CHUNK_BYTES", chunk)
    tensors = checkpoint()
    tensors["lm_head.weight"] = tensors["embed.weight"].clone()
    tensors["lm_head.weight"][-1, -1] += 1
    write(tmp_path, tensors)
    model = Model(tied=True)
    report = load_weights(model, TABLE, tmp_path)
    assert (report.ignored, report.untied) == ({}, ("lm_head.weight",))
    assert model.lm_head.weight is not model.embed.weight
    check(model, expected(tensors))
    (said,) = caplog.messages
    assert "ties lm_head.weight to another tensor" in said
    assert "tie_word_embeddings" in said


def test_a_padded_parameter_keeps_its_padding(tmp_path: Path) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 2), 7.0))

        def parts(self, leaf: str) -> tuple:
            return (None,)

        def placement(self, leaf: str, part=None, expert=None) -> Placement:
            return Placement(self.weight, (7, 2), (slice(4, 7),), (slice(0, 3),))

    layer, whole = Padded(), torch.randn(7, 2)
    save(tmp_path, {"weight": whole})
    load_weights(layer, WeightMap(), tmp_path)
    assert torch.equal(layer.weight, torch.cat([whole[4:], torch.full((1, 2), 7.0)]))


# --- other layouts ----------------------------------------------------------------------------------------------------


def load_all_ranks(folder: Path, stored: dict[str, torch.Tensor], table: WeightMap, ranks: int) -> None:
    """Loads `stored` on every rank and compares with `checkpoint()`, which it must be equivalent to."""
    save(folder, stored)
    for rank in range(ranks):
        model = Model(rank, ranks)
        report = load_weights(model, table, folder)
        check(model, expected(checkpoint(), rank, ranks))
        assert report.bytes_read <= sum(tensor.nbytes for tensor in stored.values()) // (ranks / 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_transposed_and_fused_as_gpt2(tmp_path: Path, ranks: int) -> None:
    stored = checkpoint()
    for leaf in ("weight", "bias"):
        stored[f"c_attn.{leaf}"] = torch.cat([stored.pop(f"{part}_proj.{leaf}") for part in "qkv"])
    stored["c_attn.weight"] = stored["c_attn.weight"].T
    stored["o_proj.weight"] = stored["o_proj.weight"].T
    into = tuple(("qkv_proj", part) for part in "qkv")
    table = WeightMap(
        [split("c_attn", into, sizes=(2, 1, 1), index=transpose()), rename("o_proj", "o_proj", index=transpose())]
    )
    load_all_ranks(tmp_path, stored, table + TABLE, ranks)


def to_pairs(weight: torch.Tensor, head: int) -> torch.Tensor:
    """The inverse of the rotary permutation: two halves to pairs (2i, 2i + 1)."""
    return weight.view(-1, 2, head // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rotary_pairs(tmp_path: Path, ranks: int) -> None:
    stored = checkpoint()
    for part, name in (("q", "wq"), ("k", "wk")):
        for leaf in ("weight", "bias"):
            stored[f"{name}.{leaf}"] = to_pairs(stored.pop(f"{part}_proj.{leaf}"), head=4)
    table = WeightMap([rename("wq", "q_proj", index=interleave(4)), rename("wk", "k_proj", index=interleave(4))])
    assert not torch.equal(stored["wq.weight"], checkpoint()["q_proj.weight"])
    load_all_ranks(tmp_path, stored, table + TABLE, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("layout", ["plain", "transposed", "alternating"])
def test_all_experts_in_one_tensor(tmp_path: Path, ranks: int, layout: str) -> None:
    stored = checkpoint()
    gate, up = (
        torch.stack([stored.pop(f"experts.{expert}.{source}_proj.weight") for expert in range(EXPERTS)])
        for source in ("gate", "up")
    )
    fused = torch.stack([gate, up], 2).flatten(1, 2) if layout == "alternating" else torch.cat([gate, up], 1)
    stored["experts.gate_up_proj"] = fused.transpose(1, 2) if layout == "transposed" else fused
    index = {"plain": None, "transposed": transpose(), "alternating": interleave(dim=1)}[layout]
    table = WeightMap([experts(("gate_proj", "up_proj"), "gate_up_proj", fused=index)]) + WeightMap(TABLE.rules[1:])
    load_all_ranks(tmp_path, stored, table, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_under_the_names_of_the_model(tmp_path: Path, ranks: int) -> None:
    load_all_ranks(tmp_path, expected(checkpoint()), TABLE, ranks)


# --- the run itself ---------------------------------------------------------------------------------------------------


def test_nothing_is_written_when_the_plan_fails(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["v_proj.bias"]
    save(tmp_path, tensors)
    model = Model()
    with pytest.raises(WeightError, match=r"qkv_proj\.bias: lacks v"):
        load_weights(model, TABLE, tmp_path)
    assert all(param.isnan().all() for param in model.parameters())


def test_a_meta_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, checkpoint())
    with pytest.raises(AssertionError, match="meta device"):
        load_weights(Model().to("meta"), TABLE, tmp_path)


class Finalizes(nn.Module):
    def __init__(self, log: list) -> None:
        super().__init__()
        self.weight = parameter(2)
        self.log = log

    def finalize_weights(self) -> None:
        self.log.append(self.weight.tolist())


def test_finalize_runs_once_per_module_after_all_weights(tmp_path: Path) -> None:
    log: list = []
    model = nn.Module()
    model.a = Finalizes(log)
    model.b = Finalizes(log)
    model.again = model.a
    save(tmp_path, {"a.weight": torch.tensor([1.0, 2.0]), "b.weight": torch.tensor([3.0, 4.0])})
    load_weights(model, WeightMap(), tmp_path)
    assert log == [[1.0, 2.0], [3.0, 4.0]]


def test_progress_counts_the_bytes_of_this_rank(tmp_path: Path) -> None:
    save(tmp_path, checkpoint())
    seen: list = []

    class Counts:
        def __init__(self, total: int) -> None:
            seen.append(total)

        def __enter__(self):
            return seen.append

        def __exit__(self, *_) -> None:
            seen.append("closed")

    report = load_weights(Model(1, 2), TABLE, tmp_path, progress=Counts)
    assert seen[0] == report.bytes_read == sum(seen[1:-1])
    assert seen[-1] == "closed"


def test_the_bar_is_quiet_in_a_pipe(capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with terminal_bar(10) as advance:
        advance(10)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with terminal_bar(10) as advance:
        advance(10)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading weights" in err


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("write", [save, save_bin])
def test_the_cast_is_part_of_the_copy(tmp_path: Path, write) -> None:
    write(tmp_path, checkpoint(torch.bfloat16))
    model = Model(1, 2)
    with Operations() as seen:
        load_weights(model, TABLE, tmp_path)
    assert "copy_" in seen.names
    assert not seen.names & {"_to_copy", "to", "clone", "contiguous", "cat", "index_select"}


MEMORY = """
import sys, torch
from contextlib import contextmanager
from torch import nn
from rapid_infer.layers.parameter import Placement
from rapid_infer.loader.index_map import transpose
from rapid_infer.loader.load import load_weights
from rapid_infer.loader.rules import rename
from rapid_infer.loader.weight_map import WeightMap

def anonymous():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

class Cut(nn.Module):
    def __init__(self, rows, columns, dim, dtype):
        super().__init__()
        self.full, self.dim = (rows, columns), dim
        shape = (rows // (2 - dim), columns // (1 + dim))
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

    def parts(self, leaf):
        return (None,)

    def placement(self, leaf, part=None, expert=None):
        cut = slice(self.full[self.dim] // 2, None)
        return Placement(self.weight, self.full, (slice(None),) * self.dim + (cut,))

dtype, index = getattr(torch, sys.argv[2]), transpose() if sys.argv[3] == "transpose" else None
model = nn.ModuleList(Cut(4096, 4096, number % 2, dtype) for number in range(6))
table = WeightMap([rename(str(n), str(n), at_start=True, index=index) for n in range(6)])
weights = sum(param.nbytes for param in model.parameters())
torch.ones(1000).to(torch.bfloat16)  # start the thread pools before the measurement
before = anonymous()
peak = before

@contextmanager
def progress(total):
    def advance(nbytes):
        global peak
        peak = max(peak, anonymous())
    yield advance

load_weights(model, table, sys.argv[1], progress=progress)
print(weights, max(peak, anonymous()) - before)
"""


@pytest.mark.parametrize("write", [save, save_bin])
@pytest.mark.parametrize(("dtype", "layout"), [("bfloat16", "plain"), ("float32", "plain"), ("bfloat16", "transpose")])
def test_memory_stays_near_the_weights(tmp_path: Path, write, dtype: str, layout: str) -> None:
    """192 MiB of bf16, of which a rank holds a half: no tensor and no whole file is ever copied aside."""
    write(tmp_path, {f"{number}.weight": torch.ones(4096, 4096, dtype=torch.bfloat16) for number in range(6)})
    command = [sys.executable, "-c", MEMORY, str(tmp_path), dtype, layout]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    weights, grown = map(int, done.stdout.split())
    assert weights == (96 << 20) * (1 if dtype == "bfloat16" else 2)
    assert 0.9 * weights < grown < 1.2 * weights
