"""The seam between a group and the ways of moving data.

A `Group` hands each `Collective` to an `Engine`: `SharedMemoryEngine` carries it out in memory that
is shared or mirrored, `C10dEngine` through a process group of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from braid.comm.algorithms.programs import PROGRAMS, check_equal_parts
from braid.comm.engines.collective import Collective
from braid.comm.engines.work import StepsBy, Work
from braid.errors import ConfigError

__all__ = ["Capabilities", "Engine", "EngineRequest", "GroupStatistics"]


class Capabilities(NamedTuple):
    """Abilities of an engine beyond moving data; the conformance suite tests those it claims.

    Attributes:
        rank_order: Whether sums are taken in the order of ranks, those of 16-bit floats in 32 bits.
            Then the bits are the same on all ranks and in one process.
        requests_any_order: Whether persistent requests may start in another order on each rank.
        messages_checked: Whether a message or part of an unexpected size is an error on all ranks.
        eager_messages: Whether a small message is sent when `send` returns, even without a
            receiver.
        algorithms: Names that `algorithm=` accepts.
        adopts: Whether tensors can be made in, or moved to, memory that needs no copies.
        wires: Whether numbers can cross a network in another format than their own.
        programs: Whether the algorithms of `schedule.collective` are carried out by name.
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
        """Refuse an algorithm or a wire format that was asked for and is not there.

        Raises:
            ConfigError: The engine does not have it, or not for parts of these sizes.
        """
        name, possible = collective.algorithm, self.algorithms
        if name is not None and name not in possible:
            choices = f"choose one of {', '.join(possible)}" if possible else "leave it out"
            msg = (
                f"this group's engine cannot use algorithm {name!r} here: {choices}, or see "
                "braid doctor for what the host does not permit"
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


@dataclass(slots=True)
class GroupStatistics:
    """Counters of what a group has done on this rank.

    Attributes:
        num_operations: Number of operations that have been started.
        nbytes: Bytes of their largest full buffers.
        spent_ns: Nanoseconds that threads have spent in operations, waits included.
        waited_ns: Nanoseconds in which nothing could be done but wait for other ranks.
    """

    num_operations: int = 0
    nbytes: int = 0
    spent_ns: int = 0
    waited_ns: int = 0


class EngineRequest(Protocol):
    """An engine's part of a persistent request."""

    def start(self, collective: Collective, scale: float | None, steps_by: StepsBy) -> Work:
        """Start once more.

        Args:
            collective: The registered collective, or the same with another description.
            scale: Factor for the result, or None.
            steps_by: Policy for the steps.
        """
        ...

    def residual(self) -> torch.Tensor | None:
        """Return what the wire format has left out; see `Request.residual`."""
        ...

    def reset_residual(self) -> None:
        """Forget what the wire format has left out."""
        ...


class Engine(Protocol):
    """A way of carrying out the collectives of one group."""

    device_types: frozenset[str]
    statistics: GroupStatistics

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the engine."""
        ...

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the one that made the engine."""
        ...

    def tune(self, timeout_s: float) -> None:
        """Measure what the choice of algorithms depends on; all members call it."""
        ...

    @property
    def costs(self) -> str:
        """Measured costs, for `use_costs`; empty without."""
        ...

    def use_costs(self, costs: str) -> None:
        """Choose algorithms by what another engine has measured; the same on all members."""
        ...

    def explain(self) -> str:
        """Say which algorithm is chosen for which size, and why."""
        ...

    def record(self) -> dict[str, list[tuple[int, str]]]:
        """Return the choices as data: operation -> [(from bytes, algorithm)]; empty if unknown."""
        ...

    def run(self, collective: Collective) -> None:
        """Carry a collective out in this thread."""
        ...

    def start(self, collective: Collective, steps_by: StepsBy) -> Work:
        """Start a collective; `steps_by` says who takes its steps."""
        ...

    def request(self, collective: Collective, number: int) -> EngineRequest:
        """Register a collective under a number that is equal on all members."""
        ...

    def advance(self) -> bool:
        """Take the steps that are possible now; return whether any could be taken."""
        ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in the memory that this engine moves fastest."""
        ...

    def adopt(self, x: torch.Tensor) -> None:
        """Move the storage of `x` into such memory, in place."""
        ...

    def token(self) -> int:
        """Return a number that this rank brings to a new group; the members exchange theirs."""
        ...

    def forget(self, token: int) -> None:
        """Free what `token` stands for, if this rank is in no new group."""
        ...

    def subset(self, order: Sequence[int], tokens: Sequence[int]) -> Engine:
        """Return the engine of a new group.

        Args:
            order: Group ranks of its members.
            tokens: Tokens that they brought.
        """
        ...

    def hand_over_to(self, engine: Any) -> None:
        """Give what this engine owns besides its group's memory to the engine of the survivors."""
        ...

    def stop(self, reason: str) -> None:
        """Tell the members that this rank takes no further part."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
