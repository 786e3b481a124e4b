"""How a group carries out what it is asked for: the seam between the user's face and the ways of moving data.

A `Call` says what is wanted, in plain words and flat tensors; an `Engine` does it. `MemoryEngine` (memory_engine) does it
in memory that is shared or mirrored, `DelegateEngine` (delegate) through a process group of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from braid.comm.engines.work import Work
from braid.comm.tensors.copies import Copies

__all__ = ["Call", "Capabilities", "Engine", "Statistics"]


class Call(NamedTuple):
    """One collective as a rank asks for it.

    Attributes:
        kind: Name of the operation.
        text: The whole description, for the user.
        digest: Of the description that is equal on all ranks: for messages it does not name the ends.
        ins: Flat tensors that are read; parts for several members lie one after the other in one tensor.
        outs: Flat tensors that are written: one, or one per member.
        widths: Elements of each part of `ins[0]`; None where all are equal or there are none.
        op: Reduction.
        peer: Root, or partner of a message (-1: any), else -1.
        tag: Of a message.
        exclusive: Of a scan.
        algorithm: By name, None for the engine's choice.
        nbytes: Size of the largest full buffer.
        site: Digest of the call site.
        timeout_s: Deadline.
        copies: What is copied before the first step and after the last; None if nothing is.
        source: Where a message from any member puts the sender's group rank.
        wire: Format in which numbers cross a network.
    """

    kind: str
    text: str
    digest: int
    ins: tuple[torch.Tensor, ...] = ()
    outs: tuple[torch.Tensor, ...] = ()
    widths: tuple[int, ...] | None = None
    op: str = "sum"
    peer: int = -1
    tag: int = 0
    exclusive: bool = False
    algorithm: str | None = None
    nbytes: int = 0
    site: int = 0
    timeout_s: float = 300.0
    copies: Copies | None = None
    source: list[int] | None = None
    wire: str | None = None


class Capabilities(NamedTuple):
    """What an engine does beyond moving data; the conformance suite asks.

    Attributes:
        rank_order: Sums are in the order of ranks, those of 16-bit floats in 32 bits: the same bits on all ranks and in
            one process.
        requests_any_order: Persistent requests may start in another order on every rank.
        messages_checked: A message or part of another size than was expected is an error on all ranks alike.
        eager_messages: A small message is sent when `send` returns, whether or not its receiver has come.
        algorithms: Names that `algorithm=` takes.
        adopts: Tensors can be made in, or moved to, memory on which collectives make no copies.
        wires: Numbers can cross a network in another format than their own.
        programs: Carries out the algorithms of `schedule.collective` by name.
    """

    rank_order: bool = True
    requests_any_order: bool = True
    messages_checked: bool = True
    eager_messages: bool = True
    algorithms: tuple[str, ...] = ()
    adopts: bool = True
    wires: bool = True
    programs: bool = True


@dataclass(slots=True)
class Statistics:
    """What a group has done so far on this rank, in the threads that called it.

    Attributes:
        num_operations: Operations carried out or handed to the progress thread.
        nbytes: Bytes of their largest full buffers.
        spent_ns: Time in operations, waits included.
        waited_ns: Time of it in which nothing could be done but wait for others.
    """

    num_operations: int = 0
    nbytes: int = 0
    spent_ns: int = 0
    waited_ns: int = 0


class Engine(Protocol):
    """A way of carrying out calls for one group."""

    device_types: frozenset[str]
    statistics: Statistics

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made it."""
        ...

    def tune(self, timeout_s: float) -> None:
        """Measure what the choice of algorithms depends on, if there is a choice; all members call it."""
        ...

    def explain(self) -> str:
        """Which algorithm is chosen when, and why."""
        ...

    def record(self) -> dict[str, list[tuple[int, str]]]:
        """The same as plain data: operation -> [(from bytes, algorithm)]; empty if the backend does not tell."""
        ...

    def run(self, call: Call) -> None:
        """Carry it out in this thread."""
        ...

    def start(self, call: Call) -> Work:
        """Carry it out in the background."""
        ...

    def launch(self, calls: Sequence[Call], *, lazily: bool = False) -> list[Work]:
        """Start calls whose steps are taken by whoever waits in this process (`lazily`: all of them); in order."""
        ...

    def begin(self, call: Call, number: int, scale: float | None, *, lazily: bool = False) -> Work:
        """Start persistent request `number`; its steps are taken by whoever waits in this process (`lazily`: all)."""
        ...

    def residual(self, call: Call, number: int) -> torch.Tensor | None:
        """What the wire format of persistent request `number`, which does `call`, has left out; see `Request.residual`."""
        ...

    def reset_residual(self, number: int) -> None:
        """Forget that."""
        ...

    def advance(self) -> bool:
        """Take the steps that are possible now of what has been started; whether any could be taken."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Tensor where this engine moves it fastest."""
        ...

    def adopt(self, x: torch.Tensor) -> None:
        """Move the storage of `x` there, in place."""
        ...

    def token(self) -> int:
        """What this rank brings to a new group of some of the members; exchanged among them."""
        ...

    def forget(self, token: int) -> None:
        """Give back what `token` stood for; this rank is in no new group."""
        ...

    def subset(self, order: Sequence[int], tokens: Sequence[int]) -> Engine:
        """Engine of a new group of the members `order` (group ranks), who brought `tokens`."""
        ...

    def bequeath(self, heir: Any) -> None:
        """Leave to `heir`, the engine of the survivors of this one's group, what it owns besides."""
        ...

    def stop(self, reason: str) -> None:
        """Tell the members that this rank takes no further part."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
