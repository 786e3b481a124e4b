"""`read_model` runs nothing that is in a file, and says what is wrong with it in one kind of error."""

import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict_saver import save

from braid.checkpoint import read_model
from braid.checkpoint.torch_distributed import _MEMBERS, _read_metadata
from braid.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3)}


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"model": WEIGHTS, "optimizer": {"lr": 0.1, "m": [torch.ones(2)]}, "epoch": 3}
        save(state, checkpoint_id=path, no_dist=True)
    return path


def test_only_the_model_of_a_distributed_checkpoint_is_read(distributed):
    tensors = read_model(distributed, format="dcp")
    assert tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(tensors[name], value) for name, value in WEIGHTS.items())
    with pytest.raises(CheckpointError, match="pass format='dcp'"):
        read_model(distributed)
    with pytest.raises(ConfigError, match="format 'pickle' is unknown"):
        read_model(distributed, format="pickle")  # type: ignore[arg-type]


def test_safetensors_are_read_and_a_description_beside_them_is_not(tmp_path):
    bomb = Bomb(tmp_path / "ran")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(bomb))
    save_file({"a": WEIGHTS["a"]}, tmp_path / "model.safetensors")
    assert torch.equal(read_model(tmp_path)["a"], WEIGHTS["a"])
    with pytest.raises(CheckpointError, match=r"posix\.mkdir, which a distributed"):
        read_model(tmp_path, format="dcp")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pass format='dcp'"):
        read_model(tmp_path)
    assert not bomb.path.exists()


def test_values_beside_the_tensors_of_a_distributed_checkpoint_are_not_unpickled(tmp_path):
    bomb = Bomb(tmp_path / "ran")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"model": WEIGHTS, "x": bomb}, checkpoint_id=tmp_path / "d", no_dist=True)
        save({"model": {"x": bomb}}, checkpoint_id=tmp_path / "e", no_dist=True)
    assert read_model(tmp_path / "d", format="dcp").keys() == WEIGHTS.keys()
    with pytest.raises(CheckpointError, match="x besides tensors"):
        read_model(tmp_path / "e", format="dcp")
    assert not bomb.path.exists()


def test_a_description_changes_no_class_of_torch(distributed, tmp_path):
    """BUILD with a pair sets attributes of whatever is on the stack, also of a class."""
    shutil.copytree(distributed, tmp_path / "d")
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (tmp_path / "d" / ".metadata").write_bytes(name + b"(N}S'version'\nI7\nstb.")
    with pytest.raises(CheckpointError):
        read_model(tmp_path / "d", format="dcp")
    assert Metadata.version is None


ENUM = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"


@pytest.mark.parametrize(
    "name", [b"__class__", b"__subclasses__", b"__new__", b"mro", b"state", b""]
)
@pytest.mark.parametrize("kind", [ENUM, ENUM.replace(b"_MEM_FORMAT_ENCODING", b"Metadata")])
def test_getattr_in_a_description_gives_no_other_attribute(tmp_path, kind, name):
    text = rf"builtins\.getattr for '{name.decode()}', which a distributed"
    (tmp_path / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(" + kind + b"V" + name + b"\ntR.")
    with pytest.raises(CheckpointError, match=text):
        read_model(tmp_path, format="dcp")


def test_getattr_in_a_description_gives_members_of_one_enum_only(tmp_path):
    """Python 3.11.0 to 3.11.3 pickles a member of an enum as such a call."""
    path, name = tmp_path / ".metadata", b"VTORCH_PRESERVE_FORMAT\n"
    for kind in (b"N", b"I0\n", b"cbuiltins\nset\n", b"ctorch\nSize\n", b"cbuiltins\ngetattr\n"):
        path.write_bytes(b"cbuiltins\ngetattr\n(" + kind + name + b"tR.")
        with pytest.raises(CheckpointError, match=r"builtins\.getattr for 'TORCH_PRESERVE_FORMAT'"):
            read_model(tmp_path, format="dcp")
    path.write_bytes(b"cbuiltins\ngetattr\n(" + ENUM + name + b"tR.")
    by_name = _read_metadata(path)
    path.write_bytes(ENUM + b"(I%d\ntR." % _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT.value)
    assert vars(by_name) == vars(_read_metadata(path))
    assert tuple(_MEM_FORMAT_ENCODING.__members__) == _MEMBERS


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"a": "../model.safetensors"}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"weight_map": {"a": ".."}},
        {"weight_map": {"a": "x\0.safetensors"}},
        {"weight_map": {"a": 7}},
        {"weight_map": {"a": ["x"]}},
        {"weight_map": {"a": 7, "b": "model.safetensors"}},
        {"weight_map": [1]},
        {"weight_map": None},
        {},
        [],
        7,
    ],
    ids=str,
)
def test_an_index_names_files_of_its_directory_only(tmp_path, index):
    save_file({"a": WEIGHTS["a"]}, tmp_path / "model.safetensors")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{inner}"):
        read_model(inner)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b'{"weight_map":' * 3000, b"[" * 100_000, b"NaN"]
)
def test_a_malformed_index_is_named(tmp_path, text):
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match="cannot read the model"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    "name", ["m.pt", "m.safetensors", INDEX, "d/__0_0.distcp", "d/.metadata", "manifest.json"]
)
def test_a_pipe_holds_nobody_up(distributed, tmp_path, name):
    shutil.copytree(distributed, tmp_path / "d")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    source = tmp_path / name if name.startswith("m.") else (tmp_path / name).parent
    with pytest.raises(CheckpointError, match="regular file"):
        read_model(source, format="dcp" if name.startswith("d/") else "auto")
    if name == "m.safetensors":
        with pytest.raises(CheckpointError, match="not a regular file"):
            read_model(tmp_path)


@pytest.mark.parametrize("name", ["m.pt", "m.bin", "m.safetensors", "m.txt", ".metadata", "x\0.pt"])
@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", b"PK\x03\x04"])  # fmt: skip
def test_anything_in_a_file_is_a_checkpoint_error(tmp_path, name, data):
    if "\0" not in name:
        (tmp_path / name).write_bytes(data)
    is_dcp = name == ".metadata"
    with pytest.raises(CheckpointError):
        read_model(tmp_path if is_dcp else tmp_path / name, format="dcp" if is_dcp else "auto")


@given(st.data())
def test_a_changed_description_gives_tensors_or_a_checkpoint_error(
    distributed, tmp_path_factory, data
):
    raw = bytearray((distributed / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    where = tmp_path_factory.mktemp("changed")
    (where / "__0_0.distcp").symlink_to(distributed / "__0_0.distcp")
    (where / ".metadata").write_bytes(raw)
    try:
        tensors = read_model(where, format="dcp")
    except CheckpointError:
        return
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
