"""The record of one collective, with the text and digest that the members of a group compare.

A `Group` makes one `Collective` per call: the operation, its flat tensors, and the caller's
options. The `Describer` adds the text for users, the digest that ranks compare, and the source line
of the call. The engine gets the same record.

When digests differ, ranks look up each other's texts. So each description is added at its first use
to this rank's name table, which peers can read. Both ends of a message have the same digest, but
the text for users differs: `send(float32[4], to rank 2)`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from braid.comm.algorithms.all_reduce import ALGORITHMS
from braid.comm.algorithms.programs import names_for
from braid.comm.formats import by_name
from braid.comm.tensors.copies import Copies
from braid.comm.tensors.reduction import check_op
from braid.errors import ConfigError
from braid.runtime.events import NameTable, Recorder
from braid.types import TensorSpec, dtype_name

__all__ = ["Collective", "Describer", "algorithm_names"]

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan")
HIERARCHICAL = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
INTEGER_AVERAGE = (
    "an average of integers loses its fraction (5 and 6 have the average 5), and their sum may "
    "overflow: convert the tensor to float before"
)
MAX_KNOWN = 8192  # cached descriptions; a job with more shapes describes some of them again


@dataclass(slots=True)
class Collective:
    """One collective as a rank calls it.

    Attributes:
        kind: Name of the operation.
        shape: Shape of the tensor that all ranks must agree on; None if shapes may differ.
        dtype: Dtype of the tensor; None for a barrier.
        op: Reduction.
        peer: Root, or partner of a message (-1: any), else -1.
        algorithm: Name of the algorithm, None for the engine's choice.
        widths: Number of elements of each part, if parts differ and all ranks know the sizes.
        exclusive: Whether a scan leaves out the rank's own tensor.
        wire: Format of numbers on a network, None for the tensor's dtype.
        ins: Flat tensors to read; parts for several members are concatenated in one tensor.
        outs: Flat tensors to write: one, or one per member.
        part_widths: Number of elements of each part of `ins[0]`, or of `outs` on the root of a
            gather; None if all are equal or there are no parts.
        nbytes: Size in bytes of the largest full buffer.
        tag: Tag of a message.
        source: List to which the sender's group rank is appended when a message from any member
            arrives.
        copies: Copies between the caller's tensors and the flat ones; None if there are none.
        result: Value that the caller gets when the operation has ended.
        reads: The caller's tensors that an all-reduce reads, for `Batch`.
        writes: The caller's tensors that an all-reduce writes, for `Batch`.
        async_op: Whether the caller does not wait.
        timeout_s: Deadline in seconds; None for the group's default.
        text: Description for users; set by the `Describer`, as are the next two.
        digest: Digest of the description, equal on all ranks.
        site: Digest of the source line of the call.
    """

    kind: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    op: str = "sum"
    peer: int = -1
    algorithm: str | None = None
    widths: tuple[int, ...] | None = None
    exclusive: bool = False
    wire: str | None = None
    ins: tuple[torch.Tensor, ...] = ()
    outs: tuple[torch.Tensor, ...] = ()
    part_widths: tuple[int, ...] | None = None
    nbytes: int = 0
    tag: int = 0
    source: list[int] | None = None
    copies: Copies | None = None
    result: Any = None
    reads: tuple[torch.Tensor, ...] = ()
    writes: tuple[torch.Tensor, ...] = ()
    async_op: bool = False
    timeout_s: float | None = None
    text: str = ""
    digest: int = 0
    site: int = 0


class Describer:
    """Keeps the texts that describe a group's operations in records and messages.

    Args:
        names: Name table of this rank, which peers read.
        events: Recorder of this rank.
        ranks: Global ranks of the members.
    """

    def __init__(self, names: NameTable, events: Recorder, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._names = names
        self._events = events
        self._known: dict[tuple[Any, ...], tuple[str, int]] = {}
        self._sites: set[int] = set()

    def describe(self, c: Collective) -> None:
        """Set the text, digest and call site of `c`.

        Raises:
            ConfigError: The reduction or algorithm does not exist, or does not support this dtype.
        """
        key = (c.kind, c.shape, c.dtype, c.op, c.peer, c.algorithm, c.widths, c.exclusive, c.wire)
        c.text, c.digest = self._known.get(key) or self._new(key, c)
        c.site = site = self._events.site()
        if site not in self._sites:
            self._enter_site(site)

    def scaled(self, c: Collective, scale: float) -> Collective:
        """Return `c` with a factor for its result; ranks compare the factor as well."""
        text = f"{c.text} scaled by {scale!r}"
        return replace(c, text=text, digest=self._names.add(text))

    def call_site(self) -> int:
        """Return the digest of the current source line of the program."""
        site = self._events.site()
        if site not in self._sites:
            self._enter_site(site)
        return site

    def _enter_site(self, site: int) -> None:
        self._sites.add(site)
        self._names.add(self._events.ring.name(site))

    def _new(self, key: tuple[Any, ...], c: Collective) -> tuple[str, int]:
        _check_algorithm(c)
        if c.wire is not None:
            _check_wire(c)
        if c.dtype is not None and c.kind in REDUCTIONS:
            check_op(c.op, c.dtype)
            whole_numbers = not (c.dtype.is_floating_point or c.dtype.is_complex)
            if c.op == "avg" and whole_numbers and len(self._ranks) > 1:
                warnings.warn(INTEGER_AVERAGE, UserWarning, stacklevel=2)
        text = _text(c)
        digest = self._names.add(text)
        if c.kind in {"send", "recv"}:
            text = self._text_of_message(c, text)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        return self._known.setdefault(key, (text, digest))

    def _text_of_message(self, c: Collective, text: str) -> str:
        peer = f"rank {self._ranks[c.peer]}" if c.peer >= 0 else "any rank"
        what = text.partition("(")[2].removesuffix(")")
        return f"{c.kind}({what}, {'to' if c.kind == 'send' else 'from'} {peer})"


def algorithm_names(kind: str) -> tuple[str, ...]:
    """Return the names of algorithms of a kind of collective, on any group."""
    built_in = tuple(ALGORITHMS) if kind == "all_reduce" else ("staged", "pulled")
    over_hosts = ("hierarchical",) if kind in HIERARCHICAL else ()
    return (*built_in, *over_hosts, *names_for(kind))


def _check_algorithm(c: Collective) -> None:
    possible = algorithm_names(c.kind)
    if c.algorithm is not None and c.algorithm not in possible:
        msg = f"{c.kind} has no algorithm {c.algorithm!r}: choose one of {', '.join(possible)}"
        raise ConfigError(msg)


def _check_wire(c: Collective) -> None:
    by_name(c.wire or "")
    if c.dtype != torch.float32 or c.op not in {"sum", "avg"}:
        msg = (
            f"wire={c.wire!r} needs a sum or avg of float32 numbers, got {c.op} of {c.dtype}: "
            "leave wire out, or convert the tensor first"
        )
        raise ConfigError(msg)
    if c.algorithm not in {None, "hierarchical"}:
        msg = (
            f"wire={c.wire!r} works with algorithm 'hierarchical' only, got {c.algorithm!r}: "
            "leave algorithm out"
        )
        raise ConfigError(msg)


def _text(c: Collective) -> str:
    if c.dtype is None:
        return f"{c.kind}()"
    dtype = dtype_name(c.dtype)
    if c.widths is not None:
        what = f"{dtype}[{' + '.join(map(str, c.widths))}]"
    elif c.shape is None:
        what = f"{dtype}[parts]"
    else:
        what = str(TensorSpec(c.shape, dtype))
    if c.kind in {"send", "recv"}:
        return f"message({what})"  # the same text for both ends
    name = f"{c.kind}[{c.algorithm}]" if c.algorithm else c.kind
    words = [what]
    words += [c.op] if c.kind in REDUCTIONS else []
    words += ["exclusive"] if c.exclusive else []
    words += [f"root={c.peer}"] if c.peer >= 0 else []
    words += [f"wire={c.wire}"] if c.wire else []
    return f"{name}({', '.join(words)})"
