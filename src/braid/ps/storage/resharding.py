"""Conversion of shard states to the state of a whole table and back, for any number of shards.

So snapshots do not depend on the number of servers that wrote them.

    shard 0  [0, 4)  ─┐                      ┌─ shard 0  [0, 6)
    shard 1  [4, 8)  ─┼─ join ── [0, 12) ── split
    shard 2  [8, 12) ─┘                      └─ shard 1  [6, 12)

A shard of a dense table has a range of elements; a shard of a sparse table has the ids that
`shard_of` assigns to it.

    name                      dense               sparse
    values, state.*           [n]                 [rows, width], in the order of ids
    ids, last_update                              [rows], [rows, 1]
    candidate.*                                   [candidates], [candidates, 1]
    sizes, param.*            [parameters]
    updates                   the same            the largest; last_update shifts by the difference
    num_*                                         summed; a split leaves them on shard 0
    lr, scalars               the same            the same
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from braid.errors import ConfigError
from braid.ps.storage.keys import shard_of
from braid.ps.storage.storage import State

__all__ = ["PARAM", "join_shards", "parts_in", "ranges_of_shards", "split_state"]

CANDIDATE = "candidate."
PARAM = "param."  # prefix of values per parameter, such as step counts
LAST_UPDATES = ("last_update", f"{CANDIDATE}last_update")


def ranges_of_shards(numel: int, num_shards: int, lengths: Sequence[int] = ()) -> list[slice]:
    """Return the elements of each dense shard.

    Args:
        numel: Number of elements of the table.
        num_shards: Number of shards.
        lengths: Number of elements of each shard; when empty, lengths differ by at most one.
    """
    ends = [*accumulate(lengths)] or [k * numel // num_shards for k in range(1, num_shards + 1)]
    return [slice(begin, end) for begin, end in pairwise([0, *ends])]


def parts_in(sizes: Sequence[int], elements: slice) -> list[tuple[int, int]]:
    """Return (parameter, number of its elements) for each parameter in a range of a flat vector.

    Args:
        sizes: Lengths of all parameters of a table, in their order.
        elements: Elements of a shard.
    """
    ends = [*accumulate(sizes)]
    lengths = [
        min(end, elements.stop) - max(end - size, elements.start)
        for end, size in zip(ends, sizes, strict=True)
    ]
    return [(number, length) for number, length in enumerate(lengths) if length > 0]


def join_shards(states: Sequence[Mapping[str, torch.Tensor]]) -> State:
    """Join the exports of all shards of a table.

    Args:
        states: Exports in the order of shards, all after the same update.

    Returns:
        State of the table, as if it had one shard; new memory.

    Raises:
        ConfigError: Shards differ in names, number of updates or rate, or share an id.
    """
    if not states:
        msg = "a table has at least one shard: pass the state of each shard, so at least one"
        raise ConfigError(msg)
    if all("sizes" in state for state in states):
        states = _with_same_names(states)
    for shard, state in enumerate(states):
        if state.keys() != states[0].keys():
            differ = ", ".join(sorted(state.keys() ^ states[0].keys()))
            msg = (
                f"shard {shard} and shard 0 belong to different tables or clocks, since one "
                f"state lacks {differ}: export all shards at the same clock"
            )
            raise ConfigError(msg)
    return _joined_rows(states) if "ids" in states[0] else _joined_ranges(states)


def split_state(
    state: Mapping[str, torch.Tensor], num_shards: int, lengths: Sequence[int] = ()
) -> list[State]:
    """Split the state of a table into the states of its shards.

    Args:
        state: State of the table, such as `join_shards` returns.
        num_shards: Number of shards.
        lengths: Number of elements of each shard of a dense table; equal lengths when empty.

    Returns:
        States for `Storage.load`, in the order of shards; new memory.

    Raises:
        ConfigError: The number of shards is not positive.
    """
    if num_shards < 1:
        msg = f"a table has at least one shard, got {num_shards}: choose 1 or more"
        raise ConfigError(msg)
    if "ids" not in state:
        ranges = ranges_of_shards(len(state["values"]), num_shards, lengths)
        return [_range_of(state, elements) for elements in ranges]
    shards_of_rows = shard_of(state["ids"], num_shards)
    shards_of_candidates = shard_of(state[f"{CANDIDATE}ids"], num_shards)
    parts: list[State] = []
    for shard in range(num_shards):
        rows = (shards_of_rows == shard).nonzero().flatten()
        candidates = (shards_of_candidates == shard).nonzero().flatten()
        part: State = {}
        for name, value in state.items():
            if value.dim():
                places = candidates if name.startswith(CANDIDATE) else rows
                part[name] = value.index_select(0, places)
            else:
                part[name] = value.clone() if shard == 0 else _without_counts(name, value)
        parts.append(part)
    return parts


def _range_of(state: Mapping[str, torch.Tensor], elements: slice) -> State:
    """Return the state of a range of elements of a dense table."""
    part = {
        name: (value[elements] if value.dim() else value).clone()
        for name, value in state.items()
        if name != "sizes" and not name.startswith(PARAM)
    }
    if "sizes" in state:
        parts = parts_in(state["sizes"].tolist(), elements) or [(0, 0)]
        numbers = [number for number, _ in parts]
        part["sizes"] = torch.tensor([length for _, length in parts])
        part |= {name: state[name][numbers] for name in state if name.startswith(PARAM)}
    return part


def _with_same_names(states: Sequence[Mapping[str, torch.Tensor]]) -> list[State]:
    """Return the states with zeros for parameters that were never stepped."""
    examples = {name: value for state in states for name, value in state.items() if value.dim()}
    return [
        {
            name: state[name]
            if name in state
            else example.new_zeros(len(state["sizes" if name.startswith(PARAM) else "values"]))
            for name, example in examples.items()
        }
        | {name: value for name, value in state.items() if not value.dim()}
        for state in states
    ]


def _joined_ranges(states: Sequence[Mapping[str, torch.Tensor]]) -> State:
    return {
        name: torch.cat([state[name] for state in states])
        if value.dim()
        else _common(name, states).clone()
        for name, value in states[0].items()
    }


def _joined_rows(states: Sequence[Mapping[str, torch.Tensor]]) -> State:
    updates = max(int(state["updates"]) for state in states)
    joined: State = {}
    for name, value in states[0].items():
        if name in LAST_UPDATES:
            ages = [state[name] + (updates - int(state["updates"])) for state in states]
            joined[name] = torch.cat(ages)
        elif value.dim():
            joined[name] = torch.cat([state[name] for state in states])
        elif name == "updates":
            joined[name] = torch.tensor(updates)
        elif _is_count(name):
            joined[name] = torch.stack([state[name] for state in states]).sum()
        else:
            joined[name] = _common(name, states).clone()
    for prefix in ("", CANDIDATE):
        ids, order = joined[f"{prefix}ids"].sort()
        if bool((ids[1:] == ids[:-1]).any()):
            twice = int(ids[1:][ids[1:] == ids[:-1]][0])
            msg = (
                f"id {twice} is in the states of several shards: pass the states of one table, "
                "each shard once"
            )
            raise ConfigError(msg)
        for name, value in joined.items():
            if value.dim() and name.startswith(CANDIDATE) == bool(prefix):
                joined[name] = value.index_select(0, order)
    return joined


def _common(name: str, states: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return a value, after checking that it is the same on all shards."""
    values = [state[name].item() for state in states]
    if any(value != values[0] for value in values):
        listed = ", ".join(f"{value:g} on shard {shard}" for shard, value in enumerate(values))
        msg = (
            f"shards can be joined only after the same update, but {name} is {listed}: export "
            "them at the same clock"
        )
        raise ConfigError(msg)
    return states[0][name]


def _is_count(name: str) -> bool:
    return name.startswith("num_")


def _without_counts(name: str, value: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(value) if _is_count(name) else value.clone()
