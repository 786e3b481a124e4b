"""The seam between a group and the ways of moving data.

A `Group` hands each `Collective` to an `Engine`: `SharedMemoryEngine` carries it out in memory that
is shared or mirrored, `C10dEngine` through a process group of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from braid.comm.engines.collective import Collective
from braid.comm.engines.work import StepsBy, Work

__all__ = ["Capabilities", "Engine", "EngineRequest", "Statistics"]


class Capabilities(NamedTuple):
    """What an engine does beyond moving data; the conformance suite asks.

    Attributes:
        rank_order: Sums are in the order of ranks, those of 16-bit floats in 32 bits: the same bits
            on all ranks and in one process.
        requests_any_order: Persistent requests may start in another order on every rank.
        messages_checked: A message or part of another size than was expected is an error on all
            ranks alike.
        eager_messages: A small message is sent when `send` returns, whether or not its receiver has
            come.
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


class EngineRequest(Protocol):
    """An engine's part of a persistent request."""

    def start(self, collective: Collective, scale: float | None, steps_by: StepsBy) -> Work:
        """Start once more; `collective` is the registered one, or its like with another description."""
        ...

    def residual(self) -> torch.Tensor | None:
        """What the wire format has left out; see `Request.residual`."""
        ...

    def reset_residual(self) -> None:
        """Forget what the wire format has left out."""
        ...


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

    def run(self, collective: Collective) -> None:
        """Carry a collective out in this thread."""
        ...

    def start(self, collective: Collective, steps_by: StepsBy) -> Work:
        """Start a collective; `steps_by` says who takes its steps."""
        ...

    def request(self, collective: Collective, number: int) -> EngineRequest:
        """Register a collective under a number that is equal on all members, to be started many times."""
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

    def hand_over_to(self, engine: Any) -> None:
        """Give what this engine owns besides its group's memory to `engine`, that of the survivors."""
        ...

    def stop(self, reason: str) -> None:
        """Tell the members that this rank takes no further part."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...
