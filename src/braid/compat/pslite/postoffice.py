"""`Postoffice.Get()`, and the functions that start and finalize a process, or return its role.

Source: PS-Lite, `include/ps/internal/postoffice.h` and `include/ps/ps.h`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from braid.compat.pslite.process import PROCESS
from braid.ps.kv.groups import ALL, SCHEDULER_GROUP, SERVER_GROUP, WORKER_GROUP

__all__ = [
    "Finalize",
    "IsScheduler",
    "IsServer",
    "IsWorker",
    "MyRank",
    "NumServers",
    "NumWorkers",
    "Postoffice",
    "Range",
    "RegisterExitCallback",
    "Start",
    "StartAsync",
    "kAll",
    "kMaxKey",
    "kScheduler",
    "kServerGroup",
    "kWorkerGroup",
]

kScheduler = SCHEDULER_GROUP
kServerGroup = SERVER_GROUP
kWorkerGroup = WORKER_GROUP
kAll = ALL
kMaxKey = (1 << 64) - 1


class Range(NamedTuple):
    """Half-open range of keys."""

    first: int
    after: int

    def begin(self) -> int:
        """Return the first key."""
        return self.first

    def end(self) -> int:
        """Return the end of the range (exclusive): the last key + 1; 2^64 for the last server."""
        return self.after

    def size(self) -> int:
        """Return the number of keys."""
        return self.after - self.first


class Postoffice:
    """The PS-Lite node of this process: its role, rank and barriers."""

    @staticmethod
    def Get() -> Postoffice:
        """Return the post office of this process."""
        return _POSTOFFICE

    def is_worker(self) -> bool:
        """Return whether this process is a worker."""
        return PROCESS.node.is_worker

    def is_server(self) -> bool:
        """Return whether this process is a server."""
        return PROCESS.node.is_server

    def is_scheduler(self) -> bool:
        """Return whether this process is the scheduler."""
        return PROCESS.node.is_scheduler

    def num_workers(self) -> int:
        """Return the number of workers."""
        return PROCESS.node.num_workers

    def num_servers(self) -> int:
        """Return the number of servers."""
        return PROCESS.node.num_servers

    def my_rank(self) -> int:
        """Return the number of this process among the processes of its role."""
        return PROCESS.node.number

    def Barrier(self, customer_id: int, node_group: int) -> None:
        """Wait until all nodes of a group have entered; each `customer_id` has other barriers."""
        PROCESS.node.barrier(node_group, customer_id)

    def GetNodeIDs(self, node_group: int) -> list[int]:
        """Return the numbers of the nodes of a group."""
        return PROCESS.node.ids(node_group)

    def GetServerKeyRanges(self) -> list[Range]:
        """Return the range of keys of each server."""
        return [Range(*bounds) for bounds in PROCESS.node.server_key_ranges()]

    def GetDeadNodes(self, t: float = 60) -> list[int]:
        """Return the numbers of nodes that have been lost for `t` seconds."""
        return PROCESS.node.dead_nodes(t)

    @staticmethod
    def ServerRankToID(rank: int) -> int:
        """Return a server's number among all nodes, from its number among the servers."""
        return 8 + 2 * rank

    @staticmethod
    def WorkerRankToID(rank: int) -> int:
        """Return a worker's number among all nodes, from its number among the workers."""
        return 9 + 2 * rank

    @staticmethod
    def IDtoRank(number: int) -> int:
        """Return a node's number among the nodes of its role, from its number among all."""
        return max((number - 8) // 2, 0)


_POSTOFFICE = Postoffice()


def StartAsync(customer_id: int = 0, argv0: str | None = None) -> None:
    """Start the node of this process from the environment; wait until all nodes have joined.

    Args:
        customer_id: Number of the caller, such as a thread; the first call starts the node.
        argv0: No effect.
    """
    del argv0
    PROCESS.start(customer_id, with_barrier=False)


def Start(customer_id: int = 0, argv0: str | None = None) -> None:
    """Start the node of this process, and wait until all nodes have called `Start`.

    See `StartAsync` for the arguments.
    """
    del argv0
    PROCESS.start(customer_id, with_barrier=True)


def Finalize(customer_id: int = 0, do_barrier: bool = True) -> None:
    """Wait for the requests of apps with a `customer_id`; customer 0 also ends the node.

    Args:
        customer_id: Number of the caller in this process, as passed to `Start`.
        do_barrier: Whether customer 0 waits for all nodes before it ends the node.
    """
    PROCESS.finalize(customer_id, with_barrier=do_barrier)


def RegisterExitCallback(cb: Callable[[], object]) -> None:
    """Register a function to call at the end of `Finalize`."""
    PROCESS.at_exit(cb)


def NumWorkers() -> int:
    """Return the number of workers."""
    return _POSTOFFICE.num_workers()


def NumServers() -> int:
    """Return the number of servers."""
    return _POSTOFFICE.num_servers()


def IsWorker() -> bool:
    """Return whether this process is a worker."""
    return _POSTOFFICE.is_worker()


def IsServer() -> bool:
    """Return whether this process is a server."""
    return _POSTOFFICE.is_server()


def IsScheduler() -> bool:
    """Return whether this process is the scheduler."""
    return _POSTOFFICE.is_scheduler()


def MyRank() -> int:
    """Return the number of this process among the processes of its role."""
    return _POSTOFFICE.my_rank()
