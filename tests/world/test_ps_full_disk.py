"""A parameter server whose disk is full: what cannot be written is said, and training goes on."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from training import said_by

from braid import ps
from braid.checkpoint import open_last, verify
from braid.comm import Group
from braid.errors import CheckpointError, ConfigError
from braid.runtime.wire import Secret
from support.worlds import run_threads

ADD = partial(torch.optim.SGD, lr=1.0)
SUM = ps.Consistency(aggregate="sum")
SIZE = 1000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if os.system(f"mount -t tmpfs -o size=256k tmpfs {tmp_path} 2>/dev/null") != 0:
        pytest.skip("this container may not mount")
    try:
        yield tmp_path
    finally:
        os.system(f"umount {tmp_path}")


def fill(disk: Path, *, spare: int = 0) -> None:
    """Fill a disk but for some bytes."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free - spare))


def _trains_on(group: Group, disk: Path) -> Any:
    options = ps.Options(replicas=1, on_worker_loss="shrink", journal=disk / "journal")
    snapshots = disk / "snapshots"
    with ps.join(group, 2, options) as node:
        table = node.dense("count", torch.zeros(SIZE), ADD, SUM)
        if not node.is_worker:
            node.serve()
            return None
        values, said = [], []

        def train(save: bool = True) -> None:
            table.push(torch.full([SIZE], -1.0))
            values.append(table.pull()[0].item())
            if save:
                step = len(values)
                said.append(said_by(lambda: node.save(snapshots, step), CheckpointError))
                said.append(str(sorted(path.name for path in snapshots.iterdir())))

        train()
        for spare in (8192, 0):
            if node.number == 0:
                fill(disk, spare=spare)
            train()
        if node.number == 1:
            return values, said[::2]
        node.postoffice.wait_until(lambda: [*node.postoffice.directory.workers] == [0], 20.0)
        had_journal = (disk / "journal").exists()
        (disk / "ballast").unlink()
        train()
        return values, said, had_journal


def test_a_full_disk_costs_a_snapshot_and_the_journal_and_nothing_else(disk, messages):
    *_, (values, said, had_journal), others = run_threads(5, _trains_on, disk)
    assert values == [2.0, 4.0, 6.0, 7.0]
    assert others == ([2.0, 4.0, 6.0], ["nothing happened"] * 3)
    first, last = "['step-00000001']", "['step-00000001', 'step-00000004']"
    cannot = f"CheckpointError: worker 0: cannot write {disk / 'snapshots'}/step-0000000"
    assert said[:2] == ["nothing happened", first]
    assert re.fullmatch(
        re.escape(f"{cannot}2: No space left on device while writing rank-00000.safetensors")
        + r", which needs 4,\d+ bytes; \d+ are left on this disk. Earlier checkpoints are untouched",
        said[2],
    )
    end = "No space left on device. Earlier checkpoints are untouched"
    assert said[3:] == [first, f"{cannot}3: {end}", first, "nothing happened", last]
    verify(disk / "snapshots" / "step-00000001")
    table = open_last(disk / "snapshots").read("tables/count/values")
    assert torch.equal(table, torch.full([SIZE], 7.0))

    journal = disk / "journal"
    failed, again = [each for each in messages if str(journal) in each]
    assert f"cannot write its journal {journal} (No space left on device) and goes on" in failed
    assert f"has written its journal {journal} again" in again
    assert not had_journal


def _has_no_place(group: Group, where: Path) -> str:
    options = ps.Options(journal=where / "missing" / "journal")
    secret = Secret(bytes(32))
    return said_by(
        lambda: ps.join_running("", secret, "run", "scheduler", 0, (1, 1), options=options),
        ConfigError,
    )


def test_a_journal_without_a_directory_is_refused_at_once(tmp_path):
    (said,) = run_threads(1, _has_no_place, tmp_path)
    assert f"the directory {tmp_path / 'missing'} for the scheduler's journal" in said
