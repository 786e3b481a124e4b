"""What a call is called: one text and one digest per kind of call, and the line of the program that made it.

Peers compare digests; when they differ they look up the texts. So whatever is described is also entered into this rank's
name table in shared memory, once, when it is first used. The two ends of a message are described alike to each other, and to
the user as what they are: `send(float32[4], to rank 2)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from braid.comm.algorithms.all_reduce import ALGORITHMS
from braid.comm.algorithms.programs import names_for
from braid.comm.formats import by_name
from braid.comm.tensors.reduction import check_op
from braid.errors import ConfigError
from braid.events import NameTable, Recorder
from braid.types import TensorSpec

__all__ = ["Describer", "Key"]

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan")
HIERARCHICAL = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
MAX_KNOWN = 8192  # descriptions that are kept; a job with more shapes than that describes some of them again


class Key(NamedTuple):
    """What distinguishes two calls; equal keys have equal descriptions.

    Attributes:
        kind: Name of the operation.
        shape: Of the tensor that all ranks must agree on; None where they need not.
        dtype: Likewise; None for a barrier.
        op: Reduction.
        peer: Root, or partner of a message, else -1.
        algorithm: By name, None for the choice by size.
        widths: Elements of each part, where they differ and all ranks know them.
        exclusive: Of a scan.
        wire: Format in which numbers cross a network, None for their own.
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


class Describer:
    """The descriptions that one group has used.

    Args:
        names: Name table of this rank, which peers read.
        events: Recorder of this rank.
        ranks: Global ranks of the members.
    """

    def __init__(self, names: NameTable, events: Recorder, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._names = names
        self._events = events
        self._known: dict[Key, tuple[str, int]] = {}
        self._sites: set[int] = set()

    def describe(self, key: Key) -> tuple[str, int]:
        """Text of a call for the user, and the digest that peers compare.

        Raises:
            ConfigError: The reduction or algorithm does not exist, or not for this dtype.
        """
        return self._known.get(key) or self._new(key)

    def call_site(self) -> int:
        """Digest of the program's line that is running."""
        site = self._events.site()
        if site not in self._sites:
            self._sites.add(site)
            self._names.add(self._events.ring.name(site))
        return site

    def _new(self, key: Key) -> tuple[str, int]:
        _check_algorithm(key)
        if key.wire is not None:
            _check_wire(key)
        if key.dtype is not None and key.kind in REDUCTIONS:
            check_op(key.op, key.dtype)
        text = _text(key)
        digest = self._names.add(text)
        if key.kind in {"send", "recv"}:
            text = self._of_message(key, text)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        return self._known.setdefault(key, (text, digest))

    def _of_message(self, key: Key, text: str) -> str:
        peer = f"rank {self._ranks[key.peer]}" if key.peer >= 0 else "any rank"
        what = text.partition("(")[2].removesuffix(")")
        return f"{key.kind}({what}, {'to' if key.kind == 'send' else 'from'} {peer})"


def _check_algorithm(key: Key) -> None:
    own = tuple(ALGORITHMS) if key.kind == "all_reduce" else ("staged", "pulled")
    over_hosts = ("hierarchical",) if key.kind in HIERARCHICAL else ()
    possible = (*own, *over_hosts, *names_for(key.kind))
    if key.algorithm is not None and key.algorithm not in possible:
        msg = f"expected an algorithm out of {', '.join(possible)} for {key.kind}, found {key.algorithm!r}"
        raise ConfigError(msg)


def _check_wire(key: Key) -> None:
    by_name(key.wire or "")
    if key.dtype != torch.float32 or key.op not in {"sum", "avg"}:
        msg = (
            f"expected sum or avg of float32 numbers for wire={key.wire!r}, found {key.op} of {key.dtype}: leave wire out, "
            "or convert the tensor first"
        )
        raise ConfigError(msg)
    if key.algorithm not in {None, "hierarchical"}:
        msg = f"expected no algorithm, or 'hierarchical', with wire={key.wire!r}, found {key.algorithm!r}"
        raise ConfigError(msg)


def _text(key: Key) -> str:
    if key.dtype is None:
        return f"{key.kind}()"
    dtype = str(key.dtype).removeprefix("torch.")
    if key.widths is not None:
        what = f"{dtype}[{' + '.join(map(str, key.widths))}]"
    elif key.shape is None:
        what = f"{dtype}[parts]"
    else:
        what = str(TensorSpec(key.shape, dtype))
    if key.kind in {"send", "recv"}:
        return f"message({what})"  # both ends must describe it in the same words
    name = f"{key.kind}[{key.algorithm}]" if key.algorithm else key.kind
    words = [what]
    words += [key.op] if key.kind in REDUCTIONS else []
    words += ["exclusive"] if key.exclusive else []
    words += [f"root={key.peer}"] if key.peer >= 0 else []
    words += [f"wire={key.wire}"] if key.wire else []
    return f"{name}({', '.join(words)})"
