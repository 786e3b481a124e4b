"""Who starts the ranks of a run and sees what happens to them: this process itself, or agents on several hosts."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from braid.clock import Clock
from braid.diagnose import MemoryKill, RunHost
from braid.launch.process.black_box import BlackBox
from braid.launch.process.output import RankOutput
from braid.launch.process.processes import Change
from braid.launch.supervise.rank import Rank
from braid.rendezvous import FromRank, JobEnvironment
from braid.wire import Secret

__all__ = ["OnChange", "OnSignal", "RankBackend", "RankPlacement", "RankSpec"]

OnChange = Callable[[Rank, Change], None]
OnSignal = Callable[[int, str], None]  # the signal, and the host where it was sent


class RankPlacement(NamedTuple):
    """Where a rank stands; fields of `JobEnvironment`."""

    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    listen: str


class RankSpec(NamedTuple):
    """Everything that the run has ready for a rank.

    Attributes:
        told: What it is told, but for descriptors.
        box: Its black box.
        output: Where its output goes.
        selector: Where its pipes and connection are watched.
        on_message: Called with what it says on its connection.
        clock: Time source.
    """

    told: JobEnvironment
    box: BlackBox
    output: RankOutput
    selector: selectors.BaseSelector
    on_message: Callable[[Rank, FromRank], None]
    clock: Clock


class RankBackend(Protocol):
    """Starts ranks; made and closed by whoever runs the job."""

    @property
    def run_id(self) -> str:
        """Name of the run."""
        ...

    @property
    def secret(self) -> Secret:
        """The run's secret."""
        ...

    @property
    def store_address(self) -> str:
        """Where the store shall listen."""
        ...

    def address_for_rank(self, listening: str) -> str:
        """How ranks reach the store that listens at `listening`."""
        ...

    @property
    def spans_hosts(self) -> bool:
        """Whether other hosts must reach that address."""
        ...

    @property
    def hosts(self) -> tuple[RunHost, ...]:
        """Where ranks are, in their order."""
        ...

    @property
    def threads(self) -> str:
        """OMP_NUM_THREADS of the ranks, and the reason."""
        ...

    @property
    def deadline_ns(self) -> int | None:
        """When `poll` is due; None when only its descriptors matter."""
        ...

    def join(
        self,
        selector: selectors.BaseSelector,
        *,
        on_change: OnChange,
        on_signal: OnSignal,
        notice: Callable[[str], None],
    ) -> None:
        """Say what happens to these from now on."""
        ...

    def leave(self) -> None:
        """Say nothing any more, and let go of the selector."""
        ...

    def place(self, rank: int) -> RankPlacement:
        """Where a rank stands."""
        ...

    def start(self, spec: RankSpec) -> Rank:
        """Start a rank, which owns its box and output from then on.

        Raises:
            OSError: The system cannot start another process.
        """
        ...

    def reap(self) -> None:
        """Look what children of this process have done."""
        ...

    def poll(self) -> None:
        """Do what is due."""
        ...

    def memory_kill(self) -> MemoryKill | None:
        """What the kernel of this host says about a kill for memory since the last call."""
        ...

    def finish(self) -> Iterator[int]:
        """End what ranks have left behind; yields until when to attend to descriptors, ends when all is done."""
        ...

    def dismiss(self, exit_code: int, text: str) -> None:
        """SendToRank all hosts how the run ended."""
        ...
