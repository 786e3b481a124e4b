"""Interface of the backends that start ranks and report their state changes.

`LocalBackend` starts ranks as children of the launcher, `RemoteBackend` through agents on several
hosts.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from braid.launch.process.black_box import BlackBox
from braid.launch.process.output import RankOutput
from braid.launch.process.processes import Change
from braid.launch.supervise.rank import Rank
from braid.runtime.clock import Clock
from braid.runtime.diagnose.run_record import RunHost
from braid.runtime.diagnose.verdict import MemoryKill
from braid.runtime.rendezvous import FromRank, JobEnvironment
from braid.runtime.wire import Secret

__all__ = ["OnChange", "OnSignal", "RankBackend", "RankPlacement", "RankSpec"]

OnChange = Callable[[Rank, Change], None]
OnSignal = Callable[[int, str], None]  # number of the signal, and the host that received it


class RankPlacement(NamedTuple):
    """Host of a rank and its index there; the fields are named as in `JobEnvironment`."""

    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    listen: str


class RankSpec(NamedTuple):
    """Objects that a rank is started with.

    Attributes:
        environment: Settings of the rank, without descriptors.
        box: Black box of the rank: its events and stacks, in memory that outlives the rank.
        output: Destination of the rank's output.
        selector: Selector that polls the rank's pipes and connection.
        on_message: Called with each message from the rank.
        clock: Time source.
    """

    environment: JobEnvironment
    box: BlackBox
    output: RankOutput
    selector: selectors.BaseSelector
    on_message: Callable[[Rank, FromRank], None]
    clock: Clock


class RankBackend(Protocol):
    """Starts ranks and reports their state changes; the caller of `carry_out` closes it."""

    @property
    def run_id(self) -> str:
        """Name of the run."""

    @property
    def secret(self) -> Secret:
        """Secret of the run."""

    @property
    def store_address(self) -> str:
        """Address on which the store listens."""

    def address_for_rank(self, listening: str) -> str:
        """Return the address at which ranks reach the store that listens at `listening`."""

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks run on several hosts, which must reach the store."""

    @property
    def is_on_engine(self) -> bool:
        """Whether an engine (such as Slurm) runs the nodes; it may repeat SIGTERM."""

    @property
    def hosts(self) -> tuple[RunHost, ...]:
        """Hosts of the ranks, in rank order."""

    @property
    def threads(self) -> str:
        """OMP_NUM_THREADS of the ranks, with the reason for the choice."""

    @property
    def deadline_ns(self) -> int | None:
        """Time at which `poll` is due; None if the backend waits for descriptors only."""

    def attach(
        self,
        selector: selectors.BaseSelector,
        *,
        on_change: OnChange,
        on_signal: OnSignal,
        notice: Callable[[str], None],
    ) -> None:
        """Report events of the ranks from now on.

        Args:
            selector: Selector that polls the backend's descriptors.
            on_change: Called with a rank and its state change.
            on_signal: Called when a signal asks the run to end.
            notice: Shows a text to the user.
        """

    def detach(self) -> None:
        """Stop reporting events, and unregister from the selector."""

    def placement(self, place: int, host: str = "") -> RankPlacement:
        """Return the placement of a rank.

        Args:
            place: Rank that first has the place; the index of the place on `host`, if it is named.
            host: Name of the host; empty to let the backend choose it.
        """

    def start(self, spec: RankSpec) -> Rank:
        """Start a rank, which then owns its black box and output.

        Raises:
            OSError: The system cannot start another process.
        """

    def reap(self) -> None:
        """Report state changes of child processes; call after SIGCHLD."""

    def poll(self) -> None:
        """Take the steps that are due, without blocking."""

    def memory_kill(self) -> MemoryKill | None:
        """Return the facts about an out-of-memory kill on this host since the last call."""

    def finish(self) -> Iterator[int]:
        """End the processes that ranks have left behind.

        Yields:
            Time until which the caller should poll descriptors before the next step.
        """

    def dismiss(self, exit_code: int, text: str) -> None:
        """Send the outcome of the run to all agents, if there are any.

        Args:
            exit_code: Exit code of the run.
            text: Error block; empty after success.
        """
