"""Interface between a group and its engines, which move data.

A `Group` passes each `Collective` to an `Engine`: `SharedMemoryEngine` runs it in memory that is
shared or mirrored, `C10dEngine` through a process group of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from braid.comm.algorithms.programs import PROGRAMS, check_equal_parts
from braid.comm.engines.collective import Collective, algorithm_names
from braid.comm.engines.work import StepsBy, Work
from braid.errors import ConfigError

__all__ = ["Capabilities", "Engine", "GroupStatistics"]


class Capabilities(NamedTuple):
    """Optional abilities of an engine; the conformance suite tests those that an engine claims.

    Attributes:
        rank_order: Whether sums are taken in the order of ranks, with 16-bit floats summed in 32
            bits. Then the bits are the same on all ranks and in one process.
        requests_any_order: Whether persistent requests may start in another order on each rank.
        messages_checked: Whether a message or part of an unexpected size is an error on all ranks.
        eager_messages: Whether a small message is sent when `send` returns, even without a
            receiver.
        algorithms: Names that `algorithm=` accepts.
        adopts: Whether tensors can be made in, or moved to, memory that needs no copies.
        wires: Whether numbers can be sent in a format other than their dtype.
        programs: Whether the algorithms of `schedule.collective` are available by name.
    """

    rank_order: bool = True
    requests_any_order: bool = True
    messages_checked: bool = True
    eager_messages: bool = True
    algorithms: tuple[str, ...] = ()
    adopts: bool = True
    wires: bool = True
    programs: bool = True

    def check(self, collective: Collective) -> None:
        """Raise if the engine does not support the named algorithm or wire format.

        Raises:
            ConfigError: The engine lacks the algorithm or format, or does not support parts of
                these sizes.
        """
        name = collective.algorithm
        if name is not None and name not in self.algorithms:
            possible = [n for n in algorithm_names(collective.kind) if n in self.algorithms]
            choices = f"choose one of {', '.join(possible)}" if possible else "leave it out"
            msg = (
                f"algorithm {name!r} cannot be used by this group: {choices}, or run `braid "
                "doctor`, which lists features that this host forbids"
            )
            raise ConfigError(msg)
        if name in PROGRAMS:
            check_equal_parts(collective.kind, name, collective.part_widths)
        if collective.wire is not None and not self.wires:
            msg = (
                f"wire={collective.wire!r} does not work for tensors that a backend of torch "
                "moves: leave wire out, and convert the tensor first"
            )
            raise ConfigError(msg)


@dataclass
class GroupStatistics:
    """Counters of a group's operations on this rank.

    Attributes:
        num_operations: Number of started operations.
        nbytes: Sum of the bytes of their largest full buffers.
        spent_ns: Nanoseconds that threads have spent in operations, including waits.
        waited_ns: Nanoseconds spent waiting for other ranks.
    """

    num_operations: int = 0
    nbytes: int = 0
    spent_ns: int = 0
    waited_ns: int = 0


class EngineRequest(Protocol):
    """An engine's part of a persistent request, an operation that is started often."""

    def start(self, collective: Collective, scale: float | None, steps_by: StepsBy) -> Work:
        """Start the operation again.

        Args:
            collective: The registered collective, or a copy with another description.
            scale: Factor for the result, or None.
            steps_by: Thread that takes the steps.
        """
        ...

    def residual(self) -> torch.Tensor | None:
        """Return the error of a lossy wire format; see `Request.residual`."""
        ...

    def reset_residual(self) -> None:
        """Set the residual to zero."""
        ...


class Engine(Protocol):
    """Executor of the collectives of one group."""

    device_types: frozenset[str]
    statistics: GroupStatistics

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engine."""
        ...

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the process that made the engine."""
        ...

    def tune(self, timeout_s: float) -> None:
        """Measure the costs for the choice of algorithms; all members call it."""
        ...

    @property
    def costs(self) -> str:
        """Measured costs, for `use_costs`; empty if not measured."""
        ...

    def use_costs(self, costs: str) -> None:
        """Choose algorithms by another engine's measured costs; the same on all members."""
        ...

    def explain(self) -> str:
        """Return a text: which algorithm is chosen for which size, and why."""
        ...

    def record(self) -> dict[str, list[tuple[int, str]]]:
        """Return algorithms by size: operation -> [(from bytes, algorithm)]; empty if unknown."""
        ...

    def run(self, collective: Collective) -> None:
        """Run a collective in this thread."""
        ...

    def start(self, collective: Collective, steps_by: StepsBy) -> Work:
        """Start a collective and return its Work; `steps_by` selects the thread for its steps."""
        ...

    def request(self, collective: Collective, number: int) -> EngineRequest:
        """Register a collective under a number that is equal on all members."""
        ...

    def advance(self) -> bool:
        """Take the steps that are possible now; return whether any was taken."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the memory that this engine moves fastest."""
        ...

    def adopt(self, x: torch.Tensor) -> None:
        """Move the storage of `x`, in place, into the memory that this engine moves fastest."""
        ...

    def token(self) -> int:
        """Return this rank's token, a number for a new group, whose members exchange tokens."""
        ...

    def forget(self, token: int) -> None:
        """Free the resources of `token`, if this rank does not join the new group."""
        ...

    def subset(self, order: Sequence[int], tokens: Sequence[int]) -> Engine:
        """Return the engine of a new group.

        Args:
            order: Group ranks of its members in this group.
            tokens: Token of each member.
        """
        ...

    def hand_over_to(self, engine: Any) -> None:
        """Transfer shared resources, such as the progress thread, to a rebuilt group's engine."""
        ...

    def stop(self, reason: str) -> None:
        """Publish that this rank has left the group for `reason`."""
        ...

    def close(self) -> None:
        """Free all resources of the engine."""
        ...
