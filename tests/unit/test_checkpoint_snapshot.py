"""Ownership: the ranks' pieces tile every tensor once, and are about equally large."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.checkpoint import CheckpointComparison, ReplicatedSnapshot
from braid.checkpoint.directory import CheckpointDirectory

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@given(SHAPES, st.integers(1, 6))
def test_every_element_has_one_owner(shapes, size):
    tensors = {f"t{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}
    owners = {name: torch.zeros(t.shape, dtype=torch.int64) for name, t in tensors.items()}
    seen: dict[str, int] = dict.fromkeys(tensors, 0)
    for rank in range(size):
        for name, shape, offset, tensor in ReplicatedSnapshot(
            tensors, rank=rank, size=size
        ).pieces():
            assert shape == tuple(tensors[name].shape)
            box = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
            owners[name][box] += 1
            seen[name] += 1
    assert all((owner == 1).all() for owner in owners.values())
    assert all(seen.values())


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_own_about_the_same_number_of_bytes(size):
    tensors = {"a": torch.zeros(1000, 4), "b": torch.zeros(10), "c": torch.zeros(3000, 1)}
    owned = [
        sum(
            piece.tensor.nbytes for piece in ReplicatedSnapshot(tensors, rank=r, size=size).pieces()
        )
        for r in range(size)
    ]
    assert sum(owned) == 28040
    assert max(owned) - min(owned) <= 2 * 16  # two boundaries, each off by less than a row


def test_the_directory_counts_steps_and_hides_what_is_in_work(tmp_path):
    home = CheckpointDirectory(tmp_path / "checkpoints")
    assert home.steps() == []
    for step in (300, 100, 200):
        home.begin(step).joinpath("x").touch()
        home.publish(step)
    home.begin(400)
    assert home.steps() == [100, 200, 300]
    home.prune(keep=2, newest=300)
    assert home.steps() == [200, 300]
    home.begin(500)
    names = sorted(entry.name for entry in home.path.iterdir())
    assert names == [".step-00000500.partial", "step-00000200", "step-00000300"]


def test_checkpoints_of_a_longer_run_are_not_pruned(tmp_path):
    home = CheckpointDirectory(tmp_path)
    for step in (1, 2, 9):
        home.begin(step)
        home.publish(step)
    home.prune(keep=1, newest=2)
    assert home.steps() == [2, 9]


def test_a_replaced_checkpoint_counts_until_its_successor_is_there(tmp_path):
    home = CheckpointDirectory(tmp_path)
    home.begin(5).joinpath("first").touch()
    home.publish(5)
    home.final(5).rename(tmp_path / ".step-00000005.old")  # a crash between two renames
    assert home.steps() == [5]
    assert home.locate(5).joinpath("first").exists()
    home.begin(5).joinpath("second").touch()
    assert home.locate(5).joinpath("first").exists()
    home.publish(5)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000005"]
    assert home.locate(5).joinpath("second").exists()


def test_a_comparison_is_equal_when_nothing_differs():
    assert CheckpointComparison(3, (), 0.0).equal
    assert not CheckpointComparison(3, ("w",), 0.0).equal
