"""Bitwise comparison of parameters and optimizers across ranks, by checksums.

Replicas that should be equal can drift: a rank has changed a buffer, a kernel is not deterministic,
a bit has flipped, an optimizer's state was loaded on rank 0 only. Training does not show it until
results are wrong. Comparing a checksum of each parameter from time to time finds the parameter and
the ranks. Data parallel training always compares in the first steps, where mistakes of a program
show, and then ever more rarely.
"""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from braid.comm import Group
from braid.errors import MismatchError
from braid.parallel.gradients.incomplete import is_part, params_of
from braid.parallel.gradients.table import ParamRecord
from braid.runtime.tensor_buffers import checksum
from braid.types import first_few

__all__ = [
    "EARLY",
    "compare_optimizers",
    "compare_values",
    "first_difference",
    "warn_of_different",
]

# averagings before which the parameters should be equal
EARLY = frozenset(2 * 10**power for power in range(9))
STATES = (
    "Load the same state of the optimizer on each rank, use the same learning rate, and change "
    "parameters on all ranks alike"
)

RESUME = (
    "Resume from a checkpoint, and look for code that changes parameters outside of the optimizer, "
    "or is not deterministic, on those ranks"
)


def compare_values(
    group: Group, records: Sequence[ParamRecord], when: str, advice: str = RESUME
) -> None:
    """Check that parameters have the same bits on all members; a collective.

    Args:
        group: Ranks that hold the parameters.
        records: Parameters to compare.
        when: Moment of the comparison in words, for the message.
        advice: Advice at the end of the message.

    Raises:
        MismatchError: Parameters differ; raised on every member, with names and ranks.

    Cost: a pass over the parameters, and one all_gather of 8 bytes per parameter.
    """
    if text := _difference(group, records, when, advice):
        raise MismatchError(text)


def _difference(group: Group, records: Sequence[ParamRecord], when: str, advice: str) -> str:
    """Return a text about parameters that differ between members; empty if none do."""
    checksums = torch.tensor([checksum(record.param) for record in records], dtype=torch.int64)
    table = group.all_gather(checksums).view(group.size, -1)
    differ = (table != table[0]).any(0).nonzero().flatten().tolist()
    if not differ:
        return ""
    lines = []
    for position in differ:
        column = table[:, position].tolist()
        usual, _ = Counter(column).most_common(1)[0]
        others = [
            str(rank) for rank, sum_ in zip(group.ranks, column, strict=True) if sum_ != usual
        ]
        lines.append(f"  {records[position].name} on rank {', '.join(others)}")
    listed = first_few(lines, 5, "\n")
    return (
        f"{len(differ)} of {len(records)} parameters differ between ranks {when}:\n{listed}\n"
        f"{advice}"
    )


def warn_of_different(group: Group, records: Sequence[ParamRecord], when: str) -> None:
    """Warn if parameters do not have the same bits on all members; a collective.

    Processors of different kinds may differ in the last bits, so this only warns.
    """
    if text := _difference(group, records, when, STATES):
        warnings.warn(text, UserWarning, stacklevel=2)


def compare_optimizers(
    group: Group,
    optimizer: torch.optim.Optimizer,
    shapes: Mapping[torch.Tensor, torch.Size] | None = None,
) -> None:
    """Check that an optimizer has the same settings and states on all members; a collective.

    Args:
        group: Ranks with the same parameters.
        optimizer: The optimizer.
        shapes: Whole shapes of parameters that are divided over ranks. States of another shape,
            and of parameters that are shards, are parts, and not compared.

    Raises:
        MismatchError: Settings or states differ; raised on every member, with the first ones.

    Cost: a pass over the states, and one all_gather of 8 bytes.
    """
    lines = [
        f"settings of parameter group {number}: "
        f"{_plain({key: value for key, value in settings.items() if key != 'params'})}"
        for number, settings in enumerate(optimizer.param_groups)
    ]
    for number, param in enumerate(params_of(optimizer)):
        whole = (shapes or {}).get(param, param.shape)
        state = optimizer.state.get(param, {})
        values = state.values() if isinstance(state, dict) else [state]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not is_part(param) and not any(x.dim() and x.shape != whole for x in tensors):
            lines.append(f"state of parameter {number}: {_plain(state)}")
    if first := first_difference(group, lines):
        name = type(optimizer).__name__
        msg = f"{name} has different settings or states on ranks, first:\n{first}\n{STATES}"
        raise MismatchError(msg)


def first_difference(group: Group, lines: Sequence[str]) -> str:
    """Return the first line that differs between members, of each member; empty if none does.

    A collective. Cost: one all_gather of 8 bytes.
    """
    digest = zlib.crc32("\n".join(lines).encode())
    digests = group.all_gather(torch.tensor([digest], device="cpu"))
    if not bool((digests != digests[0]).any()):
        return ""
    columns = zip_longest(*group.objects.all_gather(list(lines)), fillvalue="nothing")
    differing = next(column for column in columns if len(set(column)) > 1)
    pairs = zip(group.ranks, differing, strict=True)
    return "\n".join(f"  rank {rank}  {line}" for rank, line in pairs)


def _plain(value: Any) -> Any:
    """Return what two equal values of different processes have in common, with a short repr."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_meta:
            return f"{list(value.shape)} {value.layout}"
        return f"{list(value.shape)} {checksum(value):08x}" if value.dim() else value.item()
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    is_plain = value is None or isinstance(value, bool | int | float | complex | str | bytes)
    return value if is_plain else type(value).__name__
