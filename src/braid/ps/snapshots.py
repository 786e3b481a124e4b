"""Snapshots of tables in braid's checkpoint format, independent of the number of servers.

A worker pulls the whole state of each table, and writes it as tensors `tables/NAME/values`,
`tables/NAME/state.momentum_buffer`, ... Servers that begin with a snapshot read their shards from
it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from braid.checkpoint import ReplicatedSnapshot, open_last, save_alone
from braid.errors import CheckpointError
from braid.ps.storage import State, split_state

__all__ = ["read_table", "write_tables"]

PREFIX = "tables"


def write_tables(
    directory: str | os.PathLike[str],
    tables: Mapping[str, State],
    step: int,
    *,
    extra: Mapping[str, torch.Tensor] | None = None,
    state: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write a snapshot as a checkpoint.

    Args:
        directory: Directory of checkpoints.
        tables: States of tables, by name.
        step: Number of completed steps.
        extra: Further tensors, such as `model/weight`, which `braid checkpoint export` finds.
        state: Further values other than tensors, which must be JSON-serializable.
        keep: Number of checkpoints to keep, this one included; all when None.

    Raises:
        CheckpointError: The checkpoint cannot be written; earlier ones are untouched.
    """
    tensors = {
        f"{PREFIX}/{table}/{name}": tensor
        for table, state in tables.items()
        for name, tensor in state.items()
    }
    snapshot = ReplicatedSnapshot({**tensors, **(extra or {})})
    return save_alone(directory, [snapshot], step=step, state=state, keep=keep)


def read_table(
    where: str | os.PathLike[str], table: str, num_shards: int, lengths: Sequence[int] = ()
) -> list[State]:
    """Return the states of a table's shards from the snapshot in the directory `where`.

    Raises:
        CheckpointError: The snapshot is missing or damaged, or does not have the table.
    """
    checkpoint = open_last(where)
    prefix = f"{PREFIX}/{table}/"
    names = [name for name in checkpoint.manifest.tensors if name.startswith(prefix)]
    if not names:
        known = sorted({name.split("/")[1] for name in checkpoint.manifest.tensors if "/" in name})
        msg = (
            f"{checkpoint.path} does not contain the table {table!r}, only "
            f"{', '.join(known) or 'none'}: declare the tables of the run that wrote it"
        )
        raise CheckpointError(msg)
    state: dict[str, torch.Tensor] = {
        name.removeprefix(prefix): checkpoint.read(name) for name in names
    }
    return split_state(state, num_shards, lengths)
