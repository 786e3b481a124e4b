"""Checkpoints in other numbers of files and in the formats of other programs, bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from braid.checkpoint import (
    ReplicatedSnapshot,
    compare,
    export_model,
    load,
    read_manifest,
    read_model,
    reshard,
    save,
    training_numbers,
    training_tensors,
    verify,
)
from braid.checkpoint.snapshot import OWN
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.utils.skip_init(nn.Embedding, 6, 4)
        self.head = nn.utils.skip_init(nn.Linear, 4, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0).to(torch.bfloat16))
        self.register_buffer("count", torch.arange(3))
        with torch.no_grad():
            self.embed.weight.copy_(torch.arange(24.0).view(6, 4))
        self.head.weight = self.embed.weight


def _save(group: Group, directory: str) -> Path:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    own = {f"{OWN}random/cpu": torch.arange(3) + group.rank}
    snapshot = ReplicatedSnapshot(
        training_tensors(model, optimizer) | own, rank=group.rank, size=group.size
    )
    state = training_numbers(model, optimizer)
    return save(directory, snapshot, step=5, group=group, state=state)


@pytest.fixture
def run(world, tmp_path) -> Path:
    return world(2, _save, str(tmp_path / "run" / "checkpoints"))[0]


def test_a_checkpoint_is_written_anew_by_any_number_of_ranks(run, world, tmp_path):
    for number in (1, 3, 7):
        path = reshard(run.parent.parent, tmp_path / f"{number}", number)
        assert path == tmp_path / f"{number}" / "step-00000005"
        assert len(verify(path).files) == number
        assert compare(run, path).equal
        assert read_manifest(path).state == read_manifest(run).state
        own = world(2, _own, str(path))
        assert [x.tolist() for x in own] == [[0, 1, 2], [1, 2, 3]]
    with pytest.raises(CheckpointError, match="it exists; choose another directory"):
        reshard(run, tmp_path / "3", 2)
    with pytest.raises(ConfigError, match="at least 1 rank, got 0"):
        reshard(run, tmp_path / "0", 0)
    with pytest.raises(CheckpointError, match="is not a checkpoint or a directory"):
        reshard(tmp_path / "nothing", tmp_path / "0", 1)


def _own(group: Group, path: str) -> torch.Tensor:
    return load(path, group=group).read("random/cpu")


@pytest.mark.parametrize(
    ("form", "name"), [("safetensors", "m.safetensors"), ("torch", "m.pt"), ("dcp", "m")]
)
def test_what_is_exported_is_read_back_and_loads_into_the_model(run, tmp_path, form, name):
    out = tmp_path / name
    assert export_model(run, out, form) == 4
    model, expected = Tied(), read_model(run)
    with torch.no_grad():
        model.embed.weight.zero_()
    if form == "dcp":
        with pytest.raises(CheckpointError, match="distributed checkpoint of torch: pass format="):
            read_model(out)
    tensors = read_model(out, format="dcp" if form == "dcp" else "auto")
    assert tensors.keys() == expected.keys() == model.state_dict().keys()
    model.load_state_dict(tensors)
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key])
        assert value.dtype == expected[key].dtype
    assert model.embed.weight is model.head.weight
    with pytest.raises(CheckpointError, match="the file exists; choose another name"):
        export_model(run, out, form)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_a_distributed_checkpoint_of_ours(run, tmp_path):
    from torch.distributed import checkpoint as dcp

    export_model(run, tmp_path / "m", "dcp")
    state = {"model": {key: torch.zeros_like(x) for key, x in Tied().state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "m", no_dist=True)
    for key, value in read_model(run).items():
        assert torch.equal(state["model"][key], value)


def test_files_of_other_programs_are_read(tmp_path):
    weights = {"a": torch.ones(2), "b": torch.arange(3)}
    torch.save({"epoch": 3, "state_dict": weights}, tmp_path / "whole.ckpt")
    save_file({"a": weights["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": weights["b"]}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for source in (tmp_path / "whole.ckpt", tmp_path):
        tensors = read_model(source)
        assert tensors.keys() == weights.keys()
        assert all(torch.equal(tensors[key], value) for key, value in weights.items())


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this was executed",)


def test_what_is_no_model_is_named(run, tmp_path):
    torch.save({"lr": 3, "model": {"a": 1.5}}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "cut.safetensors").write_bytes(b"\x00" * 5)
    (tmp_path / "notes.txt").write_text("nothing")
    for name, text in [
        ("other.pt", "has a besides tensors: give the state dict of a model"),
        ("list.pt", "contains list: save model.state_dict()"),
        ("evil.pt", "cannot read the model in .*UnpicklingError"),
        ("cut.safetensors", "cannot read the model in .*cut.safetensors"),
        ("gone.pt", "cannot read the model in .*FileNotFoundError"),
        ("notes.txt", "is not a model in a known format: give a file"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            read_model(tmp_path / name)
    with pytest.raises(ConfigError, match="form 'onnx' is unknown: choose one of safetensors"):
        export_model(run, tmp_path / "x", "onnx")


def test_a_damaged_checkpoint_is_named_and_so_is_the_one_before(run, tmp_path):
    before = run.with_name("step-00000004")
    shutil.copytree(run, before)
    (run / "rank-00001.safetensors").unlink()
    for call in (
        lambda: read_model(run.parent.parent),
        lambda: export_model(run.parent, tmp_path / "x.pt", "torch"),
        lambda: reshard(run.parent, tmp_path / "out", 1),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert str(caught.value) == (
            f"{run} cannot be used: rank-00001.safetensors is missing: name an earlier one, such "
            f"as {before}"
        )
