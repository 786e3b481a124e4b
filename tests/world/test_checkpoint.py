"""Checkpoints: complete or not there, readable by any number of ranks, clear about what is wrong."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from training import said_by

import braid
from braid.checkpoint import (
    BackgroundSaver,
    ReplicatedSnapshot,
    Slice,
    compare,
    load,
    loading,
    ls,
    read_manifest,
    restore_training,
    save,
    save_alone,
    saving,
    tensor_file,
    training_numbers,
    training_tensors,
    verify,
)
from braid.checkpoint.agreement import RankReport, exchange
from braid.checkpoint.manifest import encode_manifest
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError
from support.seeded import filled
from support.worlds import run_threads


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/w": torch.randn(37, 5, generator=generator),
        "model/b": torch.randn(3, generator=generator).to(torch.bfloat16),
        "model/scalar": torch.tensor(3.5, dtype=torch.float64),
        "model/none": torch.empty(0, 4),
        "model/flags": torch.tensor([True, False, True]),
        "model/count": torch.arange(5),
    }


def save_all(group: Group, directory: str, step: int = 1, seed: int = 0, **options: object) -> Path:
    snapshot = ReplicatedSnapshot(tensors(seed), rank=group.rank, size=group.size)
    return save(directory, snapshot, step=step, group=group, **options)


def read_all(group: Group, directory: str) -> dict[str, torch.Tensor]:
    checkpoint = load(directory, group=group)
    return {name: checkpoint.read(name) for name in checkpoint.manifest.tensors}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("readers", [1, 2, 3])
@pytest.mark.parametrize("writers", [1, 2, 3])
def test_any_world_reads_what_any_world_wrote(world, tmp_path, writers, readers):
    paths = world(writers, save_all, str(tmp_path))
    assert paths == [tmp_path / "step-00000001"] * writers
    for found in world(readers, read_all, str(tmp_path)):
        assert_same(found, tensors())
    assert len(list(paths[0].glob("*.safetensors"))) == writers


def _columns(group: Group, directory: str) -> list[torch.Tensor]:
    """Save by rows, read by columns: every box overlaps several pieces."""
    save_all(group, directory)
    checkpoint = load(directory, group=group)
    return [checkpoint.read("model/w", (slice(5, 30), slice(c, c + 2))) for c in range(4)]


def test_a_part_is_assembled_from_the_pieces_that_it_overlaps(world, tmp_path):
    expected = [tensors()["model/w"][5:30, c : c + 2] for c in range(4)]
    for found in world(3, _columns, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Columns:
    """A snapshot that is sharded along dim 1, with several boxes on each rank."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def pieces(self) -> list[Slice]:
        full = torch.arange(24.0).view(4, 6)
        mine = range(self.group.rank, 6, self.group.size)
        return [Slice("w", (4, 6), (0, c), full[:, c : c + 1]) for c in mine]


def _sharded(group: Group, directory: str) -> torch.Tensor:
    save(directory, Columns(group), step=3, group=group)
    return load(directory, group=group).read("w")


def test_any_tiling_can_be_saved(world, tmp_path):
    for found in world(2, _sharded, str(tmp_path)):
        assert torch.equal(found, torch.arange(24.0).view(4, 6))


def _hole(group: Group, directory: str) -> None:
    class Half:
        def pieces(self) -> list[Slice]:
            return [Slice("w", (4,), (0,), torch.ones(2))] if group.rank == 0 else []

    save(directory, Half(), step=3, group=group)


def test_pieces_that_leave_a_hole_are_refused_on_every_rank(world, tmp_path):
    with pytest.raises(CheckpointError, match=r"'w' has pieces that do not add up") as caught:
        world(2, _hole, str(tmp_path))
    assert len({str(error) for error in caught.value.rank_errors.values()}) == 1
    assert len(caught.value.rank_errors) == 2
    assert list(tmp_path.iterdir()) == []


def _keep_two(group: Group, directory: str) -> list[tuple[int, bool]]:
    told: list[tuple[int, bool]] = []
    for step in (1, 2, 3):
        save_all(group, directory, step, keep=2, on_saved=lambda s, _, ok: told.append((s, ok)))
    return told


def test_older_ones_go_and_everyone_is_told(world, tmp_path):
    assert world(2, _keep_two, str(tmp_path)) == [[(1, True), (2, True), (3, True)]] * 2
    assert [(line.step, line.world_size, line.problem) for line in ls(tmp_path)] == [
        (2, 2, ""),
        (3, 2, ""),
    ]


def test_the_same_step_can_be_saved_again(tmp_path):
    run_threads(1, save_all, str(tmp_path), 5, 0)
    run_threads(2, save_all, str(tmp_path), 5, 1)
    (found,) = run_threads(1, read_all, str(tmp_path))
    assert_same(found, tensors(1))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def _fail_on_rank_one(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    original = tensor_file.write_tensor_file

    def failing(path: Path, tensors: dict[str, torch.Tensor]) -> object:
        if path.name == "rank-00001.safetensors":
            path.write_bytes(b"half")
            raise OSError(code, os.strerror(code))
        return original(path, tensors)

    monkeypatch.setattr("braid.checkpoint.saving.write_tensor_file", failing)


def test_a_disk_that_fills_up_on_one_rank_is_the_same_error_on_all(tmp_path, monkeypatch):
    run_threads(3, save_all, str(tmp_path), 1)
    _fail_on_rank_one(monkeypatch, errno.ENOSPC)
    with pytest.raises(CheckpointError) as caught:
        run_threads(3, save_all, str(tmp_path), 2)
    texts = {rank: str(error) for rank, error in caught.value.rank_errors.items()}
    assert texts == dict.fromkeys(range(3), texts[0])
    assert "rank 1: No space left on device while writing rank-00001.safetensors" in texts[0]
    assert "bytes; " in texts[0]
    assert texts[0].endswith("Earlier checkpoints are untouched")
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    verify(tmp_path / "step-00000001")


def test_a_disk_that_is_too_small_is_noticed_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "braid.checkpoint.directory.shutil.disk_usage",
        lambda _: shutil._ntuple_diskusage(10, 9, 1000),
    )
    with pytest.raises(CheckpointError, match=r"needs 1,04\d,\d+ bytes, 1,000 are free"):
        run_threads(2, save_all, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_says_why(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        run_threads(2, save_all, str(tmp_path / "file"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_file_system_leaves_earlier_checkpoints_alone(tmp_path, monkeypatch):
    if os.system(f"mount -t tmpfs -o size=1536k tmpfs {tmp_path} 2>/dev/null") != 0:
        pytest.skip("this container may not mount")
    try:
        run_threads(2, save_all, str(tmp_path), 1)
        (tmp_path / "ballast").write_bytes(b"x" * 1_490_000)
        with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes, [\d,]+ are free"):
            run_threads(2, save_all, str(tmp_path), 2)
        monkeypatch.setattr(
            "braid.checkpoint.directory.CheckpointDirectory.free_bytes", lambda _: 1 << 40
        )
        big = {"w": torch.zeros(100_000)}
        with pytest.raises(CheckpointError, match="No space left on device"):
            run_threads(1, lambda g: save(tmp_path, ReplicatedSnapshot(big), step=2, group=g))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["ballast", "step-00000001"]
        verify(tmp_path / "step-00000001")
    finally:
        os.system(f"umount {tmp_path}")


def test_a_file_that_cannot_be_written_makes_no_checkpoint_of_the_others(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    snapshot = ReplicatedSnapshot(tensors())
    save_alone(tmp_path, [snapshot], step=1)
    monkeypatch.setattr("braid.checkpoint.saving.write_tensor_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device while writing rank-00000"):
        save_alone(tmp_path, [snapshot], step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def _die_while_writing(group: Group, directory: str) -> None:
    def die(*_: object) -> None:
        os._exit(9)

    if group.rank == 1:
        from braid.checkpoint import saving

        saving.write_tensor_file = die
    save_all(group, directory, 2)


@pytest.mark.procs
def test_a_crash_leaves_the_last_complete_one_and_the_next_save_cleans_up(procs, tmp_path):
    from support.pool import RankDiedError

    procs(2, save_all, str(tmp_path), 1)
    with pytest.raises(RankDiedError):
        procs(2, _die_while_writing, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".step-00000002.partial",
        "step-00000001",
    ]
    assert_same(procs(2, read_all, str(tmp_path))[1], tensors())
    procs(2, save_all, str(tmp_path), 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def _damage(path: Path, how: str) -> None:
    file = path / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    if how == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif how == "truncate":
        file.write_bytes(data[:-3])
    elif how == "missing":
        file.unlink()
    elif how == "link":
        file.rename(path.parent / "elsewhere")
        file.symlink_to(path.parent / "elsewhere")
    elif how == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif how == "manifest":
        (path / "manifest.json").unlink()
    else:
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"step": 2', '"step": 7'))


REASONS = {
    "flip": "sha256 mismatch in rank-00001.safetensors",
    "truncate": "rank-00001.safetensors is truncated or extended: ",
    "missing": "rank-00001.safetensors is missing",
    "link": "rank-00001.safetensors is a symbolic link",
    "pipe": "rank-00001.safetensors is not a regular file",
    "manifest": "incomplete: no manifest.json",
    "altered": "sha256 mismatch in manifest.json",
}


def _load_and_say(group: Group, directory: str) -> tuple[int, list[tuple[str, str]]]:
    checkpoint = load(directory, group=group)
    return checkpoint.manifest.step, [tuple(skipped) for skipped in checkpoint.skipped]


@pytest.mark.parametrize("how", REASONS)
def test_a_damaged_checkpoint_is_passed_over_and_named(world, tmp_path, how):
    world(2, save_all, str(tmp_path), 1)
    world(2, save_all, str(tmp_path), 2)
    _damage(tmp_path / "step-00000002", how)
    for step, skipped in world(2, _load_and_say, str(tmp_path)):
        assert step == 1
        ((path, reason),) = skipped
        assert path == str(tmp_path / "step-00000002")
        assert REASONS[how] in reason
    with pytest.raises(CheckpointError, match=REASONS[how]):
        verify(tmp_path / "step-00000002")


def test_nothing_to_load_is_the_same_error_on_every_rank(world, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"has no readable checkpoint: does not exist"
    ) as caught:
        world(2, _load_and_say, str(tmp_path / "nothing"))
    assert len(caught.value.rank_errors) == 2


def test_every_bad_checkpoint_is_listed_when_none_is_left(tmp_path):
    for step, how in ((1, "flip"), (2, "manifest")):
        run_threads(2, save_all, str(tmp_path), step)
        _damage(tmp_path / f"step-0000000{step}", how)
    with pytest.raises(CheckpointError) as caught:
        run_threads(1, _load_and_say, str(tmp_path))
    assert str(caught.value).split("\n") == [
        f"{tmp_path} has no complete checkpoint:",
        f"  {tmp_path}/step-00000002: incomplete: no manifest.json",
        f"  {tmp_path}/step-00000001: sha256 mismatch in rank-00001.safetensors",
    ]


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="keep=0"):
        run_threads(1, lambda g: save_all(g, str(tmp_path), keep=0))


def _net(width: int = 4) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2), nn.BatchNorm1d(2))
    return filled(net, 1)


def _groups(net: nn.Module, *, swapped: bool = False) -> torch.optim.Optimizer:
    params = list(net.parameters())
    halves = [params[:2], params[2:]]
    if swapped:
        halves = [list(reversed(half)) for half in halves]
    return torch.optim.AdamW([{"params": halves[0], "lr": 0.01}, {"params": halves[1]}], lr=0.1)


def _steps(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    for step in range(first, first + count):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def _save_training(path: Path, group: Group, net: nn.Module, optimizer: Any, **more: Any) -> None:
    state = training_numbers(net, optimizer, **more)
    snapshot = ReplicatedSnapshot(training_tensors(net, optimizer))
    save(path, snapshot, step=3, state=state, group=group)


def test_an_optimizer_with_another_order_of_parameters_continues_to_the_bit(tmp_path):
    def main(group: Group) -> None:
        with torch.random.fork_rng():  # nn.Linear draws its initial values
            whole, half, other = _net(), _net(), _net()
        optimizer = _groups(whole)
        _steps(whole, optimizer, 0, 6)
        optimizer = _groups(half)
        _steps(half, optimizer, 0, 3)
        generator = torch.Generator().manual_seed(5)
        torch.rand(3, generator=generator)
        _save_training(tmp_path, group, half, optimizer, generators={"noise": generator})
        swapped = _groups(other, swapped=True)
        fresh = torch.Generator()
        restore_training(load(tmp_path, group=group), other, swapped, generators={"noise": fresh})
        assert torch.equal(torch.rand(2, generator=fresh), torch.rand(2, generator=generator))
        _steps(other, swapped, 3, 3)
        expected = whole.state_dict()
        assert_same(other.state_dict(), expected)

    run_threads(1, main)


def test_another_model_is_a_table_of_what_differs(tmp_path):
    def main(group: Group) -> str:
        with torch.random.fork_rng():
            net, wider = _net(), _net(5)
        save(tmp_path, ReplicatedSnapshot(training_tensors(net)), step=3, group=group)
        before = {name: value.clone() for name, value in wider.state_dict().items()}
        with pytest.raises(CheckpointError) as caught:
            restore_training(load(tmp_path, group=group), wider)
        assert_same(wider.state_dict(), before)
        return str(caught.value)

    (text,) = run_threads(1, main)
    assert text.split("\n") == [
        f"{tmp_path}/step-00000003 is not a checkpoint of this model: 3 tensors differ:",
        "  tensor          checkpoint     here",
        "  model/0.bias    float32[4]     float32[5]",
        "  model/0.weight  float32[4, 3]  float32[5, 3]",
        "  model/2.weight  float32[2, 4]  float32[2, 5]",
    ]


def test_another_optimizer_is_refused(tmp_path):
    def main(group: Group) -> None:
        with torch.random.fork_rng():
            net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        _save_training(tmp_path, group, net, optimizer)
        loaded = load(tmp_path, group=group)
        with pytest.raises(CheckpointError) as caught:
            restore_training(loaded, net, _groups(net))
        assert str(caught.value) == (
            f"the optimizer is AdamW with 2 groups of 2 and 4 parameters, but the state in "
            f"{tmp_path}/step-00000003 is from SGD with 1 group of 6 parameters: make the "
            "same optimizer as for the checkpoint, or load the model without it"
        )

    run_threads(1, main)


def test_a_parameter_of_another_group_is_named(tmp_path):
    def main(group: Group) -> None:
        with torch.random.fork_rng():
            net = _net()
        params = list(net.parameters())
        halves = [{"params": params[:3]}, {"params": params[3:]}]
        saved, here = torch.optim.SGD(halves, lr=0.1), torch.optim.SGD(halves[::-1], lr=0.1)
        _save_training(tmp_path, group, net, saved)
        loaded = load(tmp_path, group=group)
        with pytest.raises(
            CheckpointError, match=r"3 and 3 parameters, and group 0 there has no 2\.bias:"
        ):
            restore_training(loaded, net, here)

    run_threads(1, main)


def _forged(change: dict[str, object]) -> dict[str, object]:
    """The state of a training in which some fields have other values."""
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    state = training_numbers(net, optimizer, generators={"data": torch.Generator()})
    for field, value in change.items():
        place, *keys = state, *field.split(".")
        for key in keys[:-1]:
            place = place[int(key) if isinstance(place, list) else key]
        place[keys[-1]] = value
    return state


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("optimizer", 3, "state.optimizer of .* cannot be loaded: Expected `object`, got `int`"),
        ("optimizer", [], "state.optimizer of"),
        ("optimizer.type", 5, "state.optimizer.type of"),
        ("optimizer.groups", {}, "state.optimizer.groups of"),
        ("optimizer.groups", ["a"], r"state.optimizer.groups\[0\] of"),
        ("optimizer.groups.0.names", 7, r"state.optimizer.groups\[0\].names of"),
        ("optimizer.groups.0.names", [[]], r"state.optimizer.groups\[0\].names of"),
        ("optimizer.groups.0.lr", "high", r"groups\[0\].lr of .*: Expected a number, got 'high'"),
        ("optimizer.groups.0.lr", {"x": 1}, "which is not a tensor, float, tuple, dict or counter"),
        (
            "optimizer.groups.0.lr",
            {"pairs": [[[], 1]]},
            "which is not a tensor, float, tuple, dict",
        ),
        ("optimizer.groups.0.lr", {"counter": [7]}, "which is not a tensor, float, tuple, dict"),
        ("optimizer.numbers", {"nobody": {}}, "optimizer.numbers of .* contains 'nobody'"),
        ("optimizer.numbers", {"0.weight": {"step": "x"}}, "AdamW cannot load state.optimizer"),
        ("optimizer.rest", "x", "state.optimizer.rest of"),
        ("generators", 1.5, "state.generators of"),
        ("generators.data", 9, "state.generators.data of .*: it is not a state of a generator"),
        (
            "generators.data",
            "AAAA",
            "state.generators.data of .*: it is not a state of a generator",
        ),
        ("generators.data", "&", "state.generators.data of .*: it is not a state of a generator"),
    ],
)
def test_a_state_that_was_forged_is_an_error_with_the_name_of_the_field(
    tmp_path, field, value, told
):
    def main(group: Group) -> None:
        with torch.random.fork_rng():
            net, state = _net(), _forged({field: value})
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        tensors = training_tensors(net, optimizer)
        save(tmp_path, ReplicatedSnapshot(tensors), step=3, state=state, group=group)
        with pytest.raises(CheckpointError, match=told):
            restore_training(
                load(tmp_path, group=group), net, optimizer, generators={"data": torch.Generator()}
            )

    run_threads(1, main)


def test_a_file_of_another_length_is_not_hashed(tmp_path, monkeypatch):
    path = run_threads(1, save_all, str(tmp_path))[0]
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    monkeypatch.setattr(loading, "hash_file", lambda _: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match="truncated or extended"):
        verify(path)


FORGED_PARTS = [
    ("parts", None), ("parts", 7), ("parts", []), ("parts", "ab"),
    *[
        (("parts", "scheduler"), value)
        for value in (
            None, 7, "x", [], [1], {}, {"dict": {}}, {"dict": {"_schedulers": 3}}, {"tuple": [1]},
            {"dict": {"last_epoch": {"tensor": "nowhere"}}}, {"dict": {"base_lrs": {"x": 1}}},
            {"float": "1.5"}, {"a": 1, "b": 2}, [[[{"tuple": 3}]]],
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), FORGED_PARTS, ids=str)
def test_parts_that_were_forged_are_an_error_that_names_them(tmp_path, field, value):
    def main(group: Group) -> None:
        with torch.random.fork_rng():
            net = _net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        chained = torch.optim.lr_scheduler.ChainedScheduler(
            [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
        )
        parts = {"model": net, "optimizer": optimizer, "scheduler": chained}
        path = braid.save(tmp_path, **parts, step=3, group=group)
        state = read_manifest(path).state
        if isinstance(field, str):
            state[field] = value
        else:
            state[field[0]][field[1]] = value
        forged = msgspec.structs.replace(read_manifest(path), state=state)
        (path / "manifest.json").write_bytes(encode_manifest(forged))
        with pytest.raises(CheckpointError, match=r"parts|scheduler|nowhere|optimizer's state"):
            braid.load(tmp_path, **parts, group=group)

    run_threads(1, main)


def test_a_run_whose_directory_another_run_uses_names_it(tmp_path, monkeypatch):
    """The other run's save removes what it takes for the remains of a crash."""
    write = saving.write_tensor_file

    def other_run(path: Path, tensors: dict[str, torch.Tensor]) -> object:
        monkeypatch.setattr(saving, "write_tensor_file", write)
        with monkeypatch.context() as other:
            other.setattr(saving, "this_process", lambda: "pid 812 on host a")
            run_threads(1, save_all, str(tmp_path), 5)
        return write(path, tensors)

    monkeypatch.setattr(saving, "write_tensor_file", other_run)
    with pytest.raises(CheckpointError) as caught:
        run_threads(1, save_all, str(tmp_path), 2)
    assert str(caught.value).endswith(
        "another run (pid 812 on host a) also saves to this directory: give each run a separate "
        "directory. Earlier checkpoints are untouched"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert sorted(path.name for path in (tmp_path / "step-00000005").iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
    ]


def test_a_checkpoint_of_another_step_than_its_name_is_passed_over(world, tmp_path):
    world(2, save_all, str(tmp_path), 1)
    world(2, save_all, str(tmp_path), 2)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000009")
    for step, ((_, reason),) in world(2, _load_and_say, str(tmp_path)):
        assert step == 1
        assert (
            reason
            == "manifest.json has step 2, but its directory is named step-00000009: restore the directory's name"
        )


def test_checkpoints_are_compared_bit_by_bit(tmp_path):
    for name, size, seed in (("a", 1, 0), ("b", 3, 0), ("c", 2, 1)):
        run_threads(size, save_all, str(tmp_path / name), 1, seed)
    paths = {name: tmp_path / name / "step-00000001" for name in "abc"}
    assert compare(paths["a"], paths["b"]) == (6, (), 0.0)
    different = compare(paths["a"], paths["c"])
    assert (different.differing, different.equal) == (("model/b", "model/w"), False)
    assert different.max_diff == (tensors(0)["model/w"] - tensors(1)["model/w"]).abs().max().item()


def test_no_pickle_is_in_a_checkpoint(tmp_path):
    run_threads(2, save_all, str(tmp_path))
    (path,) = tmp_path.iterdir()
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}
    assert read_manifest(path).braid.format == 1


def test_one_strided_element_is_saved_and_compared(tmp_path):
    def main(group: Group, path: Path) -> None:
        x = torch.arange(4.0)[1::4]  # counts as contiguous, though its stride is 4
        save(path, ReplicatedSnapshot({"x": x}), step=1, state={}, group=group)

    for name in "ab":
        run_threads(1, main, tmp_path / name)
    assert compare(tmp_path / "a/step-00000001", tmp_path / "b/step-00000001") == (1, (), 0.0)


def _exchange_new_types(group: Group, types: list[type[RankReport]]) -> int:
    return sum(len(exchange(group, kind())) for kind in types)


def test_ranks_as_threads_may_make_the_first_decoder_of_a_report_at_the_same_time():
    types = []
    for _ in range(20):
        numbers = ("numbers", dict[str, tuple[int, ...]], msgspec.field(default_factory=dict))
        inner = msgspec.defstruct("Inner", [numbers], frozen=True)
        outer = msgspec.defstruct(
            "Outer", [("inner", inner | None, None)], bases=(RankReport,), frozen=True
        )
        types.append(outer)
    assert run_threads(3, _exchange_new_types, types) == [60] * 3


def test_lazy_views_are_saved_as_their_values(tmp_path):
    z = torch.complex(torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 1)
    views = {"model/imag": z.conj().imag, "model/column": z.real.bfloat16()[:, :1]}
    assert views["model/imag"].is_neg()
    save_alone(tmp_path, [ReplicatedSnapshot(views)], step=1)
    found = loading.open_last(tmp_path)
    assert all(torch.equal(found.read(name), value) for name, value in views.items())


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be told")


ERRORS = {
    "RuntimeError: no memory": lambda: RuntimeError("no memory"),
    "KeyError: 'x'": lambda: KeyError("x"),
    "MemoryError": MemoryError,
    "Untold": Untold,
    "caf?": lambda: ValueError("caf\udce9"),
}
PLACES = ("pieces", "write_pieces", "publish", "state_dict")


class Failing:
    """State of a rank that cannot be collected: a snapshot, or a part of a training."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def pieces(self) -> list[Slice]:
        return [] if self._error is None else self._raise()

    def state_dict(self) -> dict[str, int]:
        return {"x": 1} if self._error is None else self._raise()

    def _raise(self) -> Any:
        raise self._error


def _fails(group: Group, place: str, name: str, directory: str) -> list[str]:
    """Saves of which one fails on one rank, and what that raises here."""
    one = 0 if place == "publish" else 1
    error = ERRORS[name]() if group.rank == one else None
    snapshot = ReplicatedSnapshot(tensors(), rank=group.rank, size=group.size)
    said = []
    with BackgroundSaver(group) as saver:
        if place == "state_dict":
            model = nn.Module()
            call = partial(braid.save, directory, model=model, step=1, group=group)
            said += [
                said_by(lambda: call(part=Failing(error)), CheckpointError),
                said_by(lambda: (call(part=Failing(error), saver=saver), saver.wait())),
            ]
        else:
            own = snapshot if place != "pieces" else Failing(error)
            said += [
                said_by(lambda: save(directory, own, step=1, group=group), CheckpointError),
                said_by(lambda: (saver.save(directory, own, step=1), saver.wait())),
            ]
    return said


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_any_exception_of_one_rank_is_the_same_error_on_all(tmp_path, monkeypatch, place, name):
    make_error = ERRORS[name]

    def fail(home: Any, pieces: Any, step: int, rank: int, *rest: Any) -> Any:
        if rank == 1:
            raise make_error()
        return write(home, pieces, step, rank, *rest)

    def refuse(*_args: Any) -> Any:
        raise make_error()

    write = saving.write_pieces
    if place == "write_pieces":
        monkeypatch.setattr(saving, "write_pieces", fail)
    if place == "publish":
        monkeypatch.setattr(saving, "publish", refuse)
    first, second = run_threads(2, _fails, place, name, str(tmp_path))
    assert first == second
    for text in first:
        assert text.startswith("CheckpointError: cannot save checkpoint")
        assert name in text
        assert "Earlier checkpoints are untouched" in text
    assert ls(tmp_path) == []
