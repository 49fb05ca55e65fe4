"""What a checkpoint directory holds, read from headers; and what is said when it cannot be read."""

import json
import pickle
import struct
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rapid_infer.errors import WeightError
from rapid_infer.loader.inventory import Inventory

TENSORS = {
    "model.embed_tokens.weight": torch.arange(60, dtype=torch.float32).reshape(10, 6),
    "model.layers.0.up_proj.weight": torch.randn(8, 6).to(torch.bfloat16),
    "model.layers.1.up_proj.weight": torch.randn(8, 6).to(torch.float16),
    "scale": torch.tensor(3.0),
}
BYTES = 240 + 96 + 96 + 4


def write_sharded(folder: Path, suffix: str = ".safetensors") -> list[str]:
    """Two shards and their index; the shards' names."""
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    names = [f"{stem}-0000{number}-of-00002{suffix}" for number in (1, 2)]
    items = list(TENSORS.items())
    homes = {}
    for shard, part in zip(names, (items[:2], items[2:])):
        save = save_file if suffix == ".safetensors" else torch.save
        save(dict(part), folder / shard)
        homes |= {name: shard for name, _ in part}
    index = {"metadata": {"total_size": BYTES}, "weight_map": homes}
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index))
    return names


def contents(inventory: Inventory, source: tuple[slice, ...] = ()) -> dict[str, torch.Tensor]:
    out = {}
    for file in inventory.files:
        with inventory.open(file) as read:
            for name, info in inventory.tensors.items():
                if info.file == file:
                    out[name] = read(name, source if info.shape else ()).clone()
    return out


def refusal(folder: Path) -> str:
    with pytest.raises(WeightError) as caught:
        Inventory.scan(folder)
    return str(caught.value)


# --- what is found ----------------------------------------------------------------------------------------------------


def write_single(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")


def write_bin(folder: Path) -> None:
    torch.save(OrderedDict(TENSORS), folder / "pytorch_model.bin")


def write_sharded_bin(folder: Path) -> None:
    write_sharded(folder, ".bin")


def write_loose(folder: Path) -> None:
    for number, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, folder / f"part{number}.safetensors")


@pytest.mark.parametrize("write", [write_single, write_sharded, write_bin, write_sharded_bin, write_loose])
def test_every_layout_gives_the_same_tensors(tmp_path: Path, write) -> None:
    write(tmp_path)
    inventory = Inventory.scan(str(tmp_path))
    assert set(inventory.tensors) == set(TENSORS)
    assert inventory.total_bytes == BYTES
    for name, tensor in TENSORS.items():
        info = inventory.tensors[name]
        assert (info.name, info.shape, info.dtype, info.nbytes) == (
            name,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.nbytes,
        )
    read = contents(inventory)
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor), name
    cut = (slice(2, 5), slice(1, 4))
    for name, tensor in contents(inventory, cut).items():
        assert torch.equal(tensor, TENSORS[name][cut] if TENSORS[name].ndim else TENSORS[name]), name


def test_tensors_come_in_the_order_of_the_data(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    infos = list(Inventory.scan(tmp_path).tensors.values())
    assert infos == sorted(infos, key=lambda info: (info.file, info.offset))
    assert len({(info.file, info.offset) for info in infos}) == len(infos)


def test_the_order_of_the_header_does_not_matter(tmp_path: Path) -> None:
    entries = {
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
    }
    header = json.dumps(entries).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1, 2))
    inventory = Inventory.scan(tmp_path)
    assert list(inventory.tensors) == ["a", "b"]
    assert {name: tensor.item() for name, tensor in contents(inventory).items()} == {"a": 1.0, "b": 2.0}


def test_safetensors_come_before_bin_and_single_before_index(tmp_path: Path) -> None:
    write_bin(tmp_path)
    write_sharded(tmp_path)
    assert {file.suffix for file in Inventory.scan(tmp_path).files} == {".safetensors"}
    write_single(tmp_path)
    assert [file.name for file in Inventory.scan(tmp_path).files] == ["model.safetensors"]


def test_loose_safetensors_come_before_bin(tmp_path: Path) -> None:
    write_bin(tmp_path)
    write_loose(tmp_path)
    assert {file.suffix for file in Inventory.scan(tmp_path).files} == {".safetensors"}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
    ],
)
def test_types_and_slices_of_types(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(128, dtype=torch.uint8).reshape(4, 32)
    tensor = tensor % 2 == 0 if dtype == torch.bool else tensor.view(dtype)
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    inventory = Inventory.scan(tmp_path)
    info = inventory.tensors["x"]
    assert (info.dtype, info.shape, info.nbytes) == (dtype, tuple(tensor.shape), 128)
    read = contents(inventory, (slice(1, 3), slice(0, 2)))["x"]
    assert torch.equal(read.contiguous().view(torch.uint8), tensor[1:3, :2].contiguous().view(torch.uint8))


def test_scanning_reads_headers_only(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 28], "data_offsets": [0, 1 << 30]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + (1 << 30))  # a hole: one gigabyte that takes no room on the disk
    assert Inventory.scan(tmp_path).total_bytes == 1 << 30


@pytest.mark.parametrize("owner", [0, 1])
def test_the_index_decides_between_two_shards(tmp_path: Path, owner: int) -> None:
    shards = write_sharded(tmp_path)
    for number, shard in enumerate(shards):
        save_file({"scale": torch.tensor(9.0), f"extra{number}": torch.zeros(1)}, tmp_path / shard)
    homes = {"scale": shards[owner], "extra0": shards[0]}
    homes |= {"extra1": shards[1]} if owner == 0 else {}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    inventory = Inventory.scan(tmp_path)
    assert inventory.tensors["scale"].file.name == shards[owner]
    # A tensor that the index does not name is part of the checkpoint all the same, and is accounted for.
    assert set(inventory.tensors) == {"scale", "extra0", "extra1"}


# --- what is refused --------------------------------------------------------------------------------------------------


def test_no_directory(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "absent")


def test_no_weight_files_lists_what_is_there(tmp_path: Path) -> None:
    assert "is empty" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    text = refusal(tmp_path)
    assert "no weight files" in text
    assert "config.json, model.safetensors (broken link), onnx/" in text


def test_absent_shards_are_all_named(tmp_path: Path) -> None:
    first, second = write_sharded(tmp_path)
    (tmp_path / first).unlink()
    text = refusal(tmp_path)
    assert "incomplete download" in text
    assert "1 of 2 shards" in text
    assert first in text
    (tmp_path / second).unlink()
    text = refusal(tmp_path)
    assert "2 of 2 shards" in text
    assert f"{first}, {second}" in text


def test_absent_shards_without_an_index(tmp_path: Path) -> None:
    for number in (1, 4):
        save_file({f"x{number}": torch.zeros(1)}, tmp_path / f"model-0000{number}-of-00004.safetensors")
    text = refusal(tmp_path)
    assert "incomplete download" in text
    assert "model-00002-of-00004.safetensors, model-00003-of-00004.safetensors" in text


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_truncated_file(tmp_path: Path, kept: float) -> None:
    write_single(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept)])
    text = refusal(tmp_path)
    assert "truncated" in text
    assert f"expected {len(data)} bytes, the file has {int(len(data) * kept)}" in text


def test_truncated_in_the_header(tmp_path: Path) -> None:
    write_single(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    text = refusal(tmp_path)
    assert "truncated inside its header" in text
    assert "the file has 40" in text


def test_trailing_bytes(tmp_path: Path) -> None:
    write_single(tmp_path)
    with (tmp_path / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    assert "longer than its header says" in refusal(tmp_path)


def test_truncated_bin(tmp_path: Path) -> None:
    write_bin(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-100])
    text = refusal(tmp_path)
    assert "truncated or damaged" in text
    assert "safetensors" in text


NAMES = ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"]


@pytest.mark.parametrize("name", NAMES)
def test_lfs_pointer(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3963750880\n")
    text = refusal(tmp_path)
    assert "Git-LFS pointer" in text
    assert "git lfs pull" in text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page", ["<!DOCTYPE html><html>Sign in</html>", "\n <?xml version='1.0'?><Error/>"])
def test_web_page(tmp_path: Path, name: str, page: str) -> None:
    (tmp_path / name).write_text(page)
    assert "a web page (HTML or XML), not weights" in refusal(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_empty_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    text = refusal(tmp_path)
    assert "the file is empty" in text
    assert "incomplete" in text


@pytest.mark.parametrize("content", [b"Entry not found", b"\x00" * 64, b"\xff" * 64, b"abc"])
def test_rubbish(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert f"not a safetensors file; it starts with {content[:16]!r}" in refusal(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    assert f"not a torch file; it starts with {content[:16]!r}" in refusal(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": "two", "data_offsets": [0, 4]},
    ],
)
def test_damaged_header(tmp_path: Path, entry: dict) -> None:
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert "header is damaged" in refusal(tmp_path)


def test_unknown_type_is_named(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))
    assert "tensor x has type F6_E2M3" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content", ["{not json", "[]", '{"metadata": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_unparsable_index(tmp_path: Path, content: str) -> None:
    write_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "not a weight index" in refusal(tmp_path)


def test_index_that_leaves_the_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    assert "outside the checkpoint directory" in refusal(tmp_path)


def test_index_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    first, _ = write_sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= {"ghost.weight": first, "ghost.bias": first}
    index.write_text(json.dumps(content))
    text = refusal(tmp_path)
    assert f"2 tensors that the index places in {first} are not there" in text
    assert "ghost.weight, ghost.bias" in text


def test_one_name_in_two_loose_files(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "b.safetensors")
    text = refusal(tmp_path)
    assert "tensor x is both in a.safetensors and in b.safetensors" in text


class Runs:
    def __reduce__(self) -> tuple:
        return (print, ("code ran",))


def test_bin_that_would_run_code(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    torch.save({"x": torch.zeros(1), "y": Runs()}, tmp_path / "pytorch_model.bin")
    text = refusal(tmp_path)
    assert "unpickling it would run code" in text
    assert "it names print" in text
    assert "add_safe_globals" not in text
    assert "safetensors" in text
    assert "code ran" not in capsys.readouterr().out


def test_bin_in_the_old_format(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    text = refusal(tmp_path)
    assert "old torch format" in text
    assert "convert the checkpoint to safetensors" in text


def test_plain_pickle(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": 1}))
    assert "pytorch_model.bin" in refusal(tmp_path)


@pytest.mark.parametrize(("content", "said"), [([torch.zeros(1)], "holds a list"), ({"x": 1}, "entry 'x' is a int")])
def test_bin_of_other_things(tmp_path: Path, content: object, said: str) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert said in refusal(tmp_path)


def test_a_file_that_vanishes_after_the_scan(tmp_path: Path) -> None:
    write_single(tmp_path)
    inventory = Inventory.scan(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightError, match="cannot be read"), inventory.open(inventory.files[0]):
        pass
