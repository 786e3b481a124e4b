"""Table of requests: a name is ready once all ranks have submitted matching requests. Pure.

Problem: each rank submits tensors from hooks and threads in a different order. If two ranks started
two collectives in opposite orders, both would hang; if a tensor had different shapes on two ranks,
one would abort and the other would wait.

Idea: rank 0 records which ranks have submitted each *name*. Once all ranks have submitted a name,
its requests are compared field by field. They are carried out on all ranks in the order of their
first submission, or refused on all ranks with an error that names the differing ranks.

Source: Sergeev & Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018,
sec. 3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from braid.compat.horovod.fusion.request import JOINABLE, Request, Response
from braid.programs.reductions import REDUCTIONS as DEFINED_OPS
from braid.programs.reductions import refusal
from braid.types import ranks_text

__all__ = ["Coordinator", "agree"]

SAME_SHAPE = frozenset({"all_reduce", "broadcast", "reduce_scatter"})
NEEDS_ROWS = frozenset({"all_gather", "all_to_all", "reduce_scatter"})
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter"})


@dataclass(slots=True)
class _Group:
    """Names that ranks have submitted in an explicit group.

    Attributes:
        by_rank: Names by position of the rank.
        sizes: Number of names in the group, as submitted by each rank.
        error: Reason why the group is refused, if its names differ between ranks.
    """

    by_rank: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    sizes: dict[int, int] = field(default_factory=dict)
    error: str = ""

    @property
    def names(self) -> set[str]:
        return set().union(*self.by_rank.values())

    def has_all(self, rank: int) -> bool:
        return rank in self.sizes and len(self.by_rank[rank]) >= self.sizes[rank]


class Coordinator:
    """Table on rank 0 of the requests that each rank of a set has submitted.

    Args:
        ranks: Global ranks, for messages. All methods use positions in this list as ranks.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._table: dict[str, dict[int, Request]] = {}
        self._since_s: dict[str, float] = {}
        self._joined: dict[int, None] = {}  # in order
        self._groups: dict[str, _Group] = defaultdict(_Group)

    def add(self, rank: int, requests: Iterable[Request], now_s: float) -> None:
        """Record the requests of a rank."""
        for request in requests:
            self._table.setdefault(request.name, {})[rank] = request
            self._since_s.setdefault(request.name, now_s)
            if request.group:
                group = self._groups[request.group]
                group.by_rank[rank].add(request.name)
                group.sizes[rank] = request.group_size

    def join(self, rank: int) -> None:
        """Record that a rank submits no more requests until all ranks have joined."""
        self._joined[rank] = None

    @property
    def joined(self) -> list[int]:
        """Positions of ranks that have joined, in order."""
        return list(self._joined)

    def all_joined(self) -> int | None:
        """Return the last rank to join once all have joined, and reset the list; otherwise None."""
        if len(self._joined) < len(self._ranks):
            return None
        last = list(self._joined)[-1]
        self._joined.clear()
        return last

    def ready(self) -> list[Response]:
        """Return responses to requests with names that all ranks have submitted, in order."""
        size = len(self._ranks)
        full = {
            name
            for name, by_rank in self._table.items()
            if len(by_rank) + sum(rank not in by_rank for rank in self._joined) == size
        }
        groups = {
            name: {(r.group, r.group_size) for r in by_rank.values()}
            for name, by_rank in self._table.items()
        }
        for name in [name for name in self._table if name in full and len(groups[name]) > 1]:
            error = agree(name, self._table[name], self._ranks).error
            for group, _ in groups[name]:
                if group:
                    known = self._groups[group]
                    known.error = known.error or _group_error(group, name, error)
        kinds = set().union(*groups.values())
        complete = {(group, n) for group, n in kinds if self._is_complete(group, n, full)}
        responses = []
        for name, by_rank in self._table.items():
            torn = [g for g, _ in sorted(groups[name]) if g and self._groups[g].error]
            error = self._groups[torn[0]].error if torn else ""
            if error and (name in full or self._is_whole_elsewhere(name, groups[name])):
                first = next(iter(by_rank.values()))
                error = _difference(by_rank, self._ranks) or error
                responses.append(Response(name, first, error=error))
            elif name in full and groups[name] <= complete:
                responses.append(agree(name, by_rank, self._ranks))
        for response in responses:
            del self._table[response.name], self._since_s[response.name]
        self._forget({group for r in responses for group, _ in groups[r.name] if group})
        return _refuse_groups(responses)

    def _is_complete(self, group: str, size: int, full: set[str]) -> bool:
        names = self._groups[group].names if group else set()
        return len(names) >= size and names <= full

    def _is_whole_elsewhere(self, name: str, groups: set[tuple[str, int]]) -> bool:
        """Return whether all ranks without this name have submitted one of its groups completely.

        The size that each rank has submitted for the group determines completeness.
        """
        absent = set(range(len(self._ranks))).difference(self._table[name], self._joined)
        return all(any(self._groups[group].has_all(rank) for group, _ in groups) for rank in absent)

    def _forget(self, groups: set[str]) -> None:
        """Remove groups that were carried out or refused.

        A refused group is kept until all ranks have submitted all of its members.
        """
        here = {r.group for by_rank in self._table.values() for r in by_rank.values()}
        for group in groups:
            known = self._groups[group]
            if not known.error or (group not in here and all(map(known.has_all, known.by_rank))):
                del self._groups[group]

    def waiting(self) -> dict[str, tuple[list[int], float]]:
        """Return names that only some ranks have submitted.

        Each name maps to the positions of these ranks, and the time of the first request.
        """
        return {
            name: (sorted(by_rank), self._since_s[name])
            for name, by_rank in self._table.items()
            if not all(request.refusal for request in by_rank.values())  # no caller waits for these
        }

    def __repr__(self) -> str:
        return (
            f"Coordinator({len(self._table)} waiting, {len(self._joined)} of "
            f"{len(self._ranks)} joined)"
        )


def _refuse_groups(responses: list[Response]) -> list[Response]:
    """Refuse all responses of a group if one of them is refused."""
    refused = {
        r.request.group: _group_error(r.request.group, r.name, r.error)
        for r in reversed(responses)
        if r.error and r.request.group
    }
    if not refused:
        return responses
    return [
        r
        if r.error or r.request.group not in refused
        else Response(r.name, r.request, error=refused[r.request.group])
        for r in responses
    ]


def _group_error(group: str, name: str, error: str) -> str:
    return f"all operations of group {group!r} fail, because {name!r} failed: {error}"


def agree(name: str, by_rank: Mapping[int, Request], ranks: Sequence[int]) -> Response:
    """Compare the requests of one name; return the common response, or a refusal.

    Args:
        name: Name of the requests.
        by_rank: Requests by position of the rank; ranks that have joined are missing.
        ranks: Global ranks by position.

    >>> mine, other = (Request("x", "all_reduce", "float32", (n,), 4, "sum") for n in (3, 4))
    >>> agree("x", {0: mine, 1: mine}, (0, 1)).error
    ''
    >>> agree("x", {0: mine, 1: other}, (0, 1)).error
    "ranks disagree on the shape of 'x': (3,) on rank 0; (4,) on rank 1"
    """
    by_rank = dict(sorted(by_rank.items()))
    first = next(iter(by_rank.values()))
    error = _difference(by_rank, ranks) or _impossible(by_rank, ranks)
    if not error and len(by_rank) < len(ranks) and first.kind not in JOINABLE:
        absent = [str(rank) for position, rank in enumerate(ranks) if position not in by_rank]
        error = (
            f"{first.kind} of {name!r} needs all ranks, but rank {', '.join(absent)} called "
            "join(): after join() only all_reduce and barrier work"
        )
    if error:
        return Response(name, first, error=error)
    layout = first.place, first.strides
    if any((request.place, request.strides) != layout for request in by_rank.values()):
        first = msgspec.structs.replace(first, place=-1)  # the layout differs between ranks
    rows: tuple[tuple[int, ...], ...] = ()
    if first.kind == "all_gather":
        rows = tuple((request.shape[0],) for request in by_rank.values())
    if first.kind == "all_to_all":
        rows = tuple(request.splits for request in by_rank.values())
    return Response(name, first, rows)


def _difference(by_rank: Mapping[int, Request], ranks: Sequence[int]) -> str:
    for position, request in sorted(by_rank.items()):
        if request.refusal:
            return f"rank {ranks[position]} cannot carry out {request.name!r}: {request.refusal}"
    first = next(iter(by_rank.values()))
    fields: list[tuple[str, Callable[[Request], Any]]] = [
        ("operation", lambda r: r.kind),
        ("text", lambda r: r.text),
        ("dtype", lambda r: r.dtype),
        ("device type", lambda r: r.device.partition(":")[0]),
        ("reduction", lambda r: r.op),
        ("root", lambda r: r.root),
        ("prescale factor", lambda r: r.prescale),
        ("postscale factor", lambda r: r.postscale),
        ("group", lambda r: (r.group, r.group_size)),
    ]
    if first.kind in SAME_SHAPE:
        fields.append(("shape", lambda r: r.shape))
    if first.kind in {"all_gather", "all_to_all"}:
        fields.append(("number of dims", lambda r: len(r.shape)))
        fields.append(("shape behind dim 0", lambda r: r.shape[1:]))
    for aspect, read in fields:
        values: dict[Any, list[int]] = {}
        for position, request in by_rank.items():
            values.setdefault(read(request), []).append(ranks[position])
        if len(values) > 1:
            named = "; ".join(
                f"{value} on {ranks_text(owners)}" for value, owners in values.items()
            )
            return (
                f"ranks disagree on the {aspect} of {first.name!r}: {named}. Submit the same on "
                "all ranks"
            )
    return ""


def _impossible(by_rank: Mapping[int, Request], ranks: Sequence[int]) -> str:
    """Return why matching requests cannot be carried out; an empty string if they can."""
    first = next(iter(by_rank.values()))
    size = len(ranks)
    if first.kind in NEEDS_ROWS and not first.shape:
        return (
            f"{first.name!r} is a scalar, but {first.kind} works along dim 0: pass a tensor with "
            "at least 1 dim"
        )
    # operations such as Adasum refuse dtypes themselves
    is_reduction = first.kind in REDUCTIONS and first.op in DEFINED_OPS
    if is_reduction and (refused := refusal(first.op, first.dtype)):
        return f"{first.name!r} cannot be reduced: {refused}"
    if first.kind == "broadcast" and not 0 <= first.root < size:
        return f"root of {first.name!r} must be one of {size} ranks, got {first.root}"
    if first.kind == "all_to_all":
        for position, request in by_rank.items():
            splits = request.splits
            if len(splits) != size or sum(splits) != request.shape[0] or min(splits) < 0:
                return (
                    f"splits of {first.name!r} must list the rows for each of {size} ranks and "
                    f"add up to the length of dim 0, got {list(splits)} for {request.shape[0]} "
                    f"rows on rank {ranks[position]}"
                )
    return ""
