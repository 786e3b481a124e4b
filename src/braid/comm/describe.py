"""What a call is called: one text and one digest per kind of call, and the line of the program that made it.

Peers compare digests; when they differ they look up the texts. So whatever is described is also entered into this rank's
name table in shared memory, once, when it is first used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from braid.comm.all_reduce import ALGORITHMS
from braid.comm.reduction import check_op
from braid.errors import ConfigError
from braid.events import NameTable, Recorder
from braid.types import OpDesc, TensorSpec, text_digest

__all__ = ["Describer", "Key"]


class Key(NamedTuple):
    """What distinguishes two calls; equal keys have equal descriptions.

    Attributes:
        kind: Name of the operation.
        shape: Of the tensor that all ranks must agree on; None for a barrier.
        dtype: Likewise.
        op: Reduction.
        peer: Root of a broadcast, partner of a message, else -1.
        algorithm: By name, None for the choice by size.
    """

    kind: str
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    op: str = "sum"
    peer: int = -1
    algorithm: str | None = None


class Describer:
    """The descriptions that one group has used.

    Args:
        names: Name table of this rank, which peers read.
        events: Recorder of this rank.
    """

    def __init__(self, names: NameTable, events: Recorder) -> None:
        self._names = names
        self._events = events
        self._known: dict[Key, tuple[str, int]] = {}
        self._sites: set[int] = set()

    def describe(self, key: Key) -> tuple[str, int]:
        """Text and digest of a call.

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
        if key.algorithm is not None and key.algorithm not in ALGORITHMS:
            msg = f"expected an algorithm out of {', '.join(ALGORITHMS)}, found {key.algorithm!r}"
            raise ConfigError(msg)
        if key.dtype is not None and "reduce" in key.kind:
            check_op(key.op, key.dtype)
        text = _text(key)
        self._names.add(text)
        return self._known.setdefault(key, (text, text_digest(text)))


def _text(key: Key) -> str:
    if key.shape is None:
        return f"{key.kind}()"
    spec = TensorSpec(tuple(key.shape), str(key.dtype).removeprefix("torch."))
    if key.kind in {"send", "recv"}:
        return f"message({spec})"  # both ends must describe it in the same words
    name = f"{key.kind}[{key.algorithm}]" if key.algorithm else key.kind
    return str(OpDesc(name, spec, key.op, key.peer if key.kind == "broadcast" else -1))
