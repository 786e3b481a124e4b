"""Choices of a whole parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from braid.ps.protocol.scheduler_state import OnWorkerLoss

__all__ = ["Options"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Choices of a whole parameter server; the same on all nodes.

    Attributes:
        replicas: Copies of each shard on other servers. Servers may die while one is left. What
            `braid run --replicas` says, else 0, when None.
        on_worker_loss: Whether the loss of a worker fails the run, lets clocks wait for a new
            process of its number, shrinks the run to the other workers, or calls a spare to replace
            it. What `braid run --on-worker-loss` says, else fail, when None.
        restore: Snapshot with which tables begin, or a directory of snapshots.
        rebalance_s: Seconds between the reports of load by which hot shards move to other servers;
            shards are balanced by their number when None.
        shared_memory: Whether large tensors between processes of one host pass through shared
            memory; never where `BRAID_PORTABLE` forbids it.
        journal: File in which the scheduler keeps its directory, so that it can be started again.
            Where it cannot be written, it is removed, with a warning, and the run goes on.
    """

    replicas: int | None = None
    on_worker_loss: OnWorkerLoss | None = None
    restore: Path | None = None
    rebalance_s: float | None = None
    shared_memory: bool = True
    journal: Path | None = None
