"""The scheduler: tracks the nodes, publishes directories, and writes the last one to a journal.

Source: M. Li et al., Parameter Server, OSDI 2014; PS-Lite's scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from braid.errors import BraidError, ConfigError, StaleError
from braid.ps.messages import (
    Barrier,
    Called,
    Dealt,
    Drain,
    Failure,
    Here,
    Installed,
    Leave,
    Loads,
    NextData,
    NodeJoin,
    Released,
    RequestRefused,
    StopAt,
)
from braid.ps.postoffice import Postoffice
from braid.ps.protocol.data_state import Issue
from braid.ps.protocol.directory import SPARE, Directory
from braid.ps.protocol.members_state import PublishDirectory, ReleaseNodes
from braid.ps.protocol.scheduler_state import (
    CallSpare,
    FailRun,
    Instruction,
    OnWorkerLoss,
    SchedulerState,
    StopWorkers,
)
from braid.runtime.message import Delivery, PeerLost, split_node

__all__ = ["Options", "Scheduler"]

LOG = logging.getLogger(__name__)

LATE_S = 30.0  # time for late nodes to receive the error of a run that failed before they joined
RETURN_S = 5.0  # time for nodes to reconnect to a scheduler that was started again


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of a whole parameter server; the same on all nodes.

    Attributes:
        replicas: Number of copies of each shard on other servers; a shard survives while one server
            has it. When None, the value of `braid run --replicas`, else 0.
        on_worker_loss: Effect of a lost worker: "fail" ends the run; "wait" waits for a spare or a
            new process with its number; "shrink" continues with the other workers; "replace" calls
            a spare, and fails without one. When None, the value of `braid run --on-worker-loss`,
            else "replace" if there are spares, else "fail".
        restore: Snapshot with which tables begin, or a directory of snapshots.
        rebalance_s: Seconds between load reports of servers, by which hot shards move to other
            servers; when None, servers are balanced by their number of shards.
        shared_memory: Whether large tensors between processes of one host are sent through shared
            memory; `BRAID_PORTABLE` disables it.
        journal: File for the scheduler's directory, so that the scheduler can be started again. If
            it cannot be written, it is removed with a warning, and the run continues.
    """

    replicas: int | None = None
    on_worker_loss: OnWorkerLoss | None = None
    restore: Path | None = None
    rebalance_s: float | None = None
    shared_memory: bool = True
    journal: Path | None = None


def _read_journal(path: Path) -> Directory | None:
    """Return the directory that an earlier scheduler wrote, with a new epoch; None without a file.

    Raises:
        ConfigError: The file is not a journal, or its parent directory does not exist.
    """
    if not path.parent.is_dir():
        msg = f"the directory {path.parent} for the scheduler's journal does not exist: create it"
        raise ConfigError(msg)
    if not path.exists():
        return None
    try:
        directory = msgspec.json.decode(path.read_bytes(), type=Directory)
    except msgspec.DecodeError as exc:
        msg = f"{path} is not a journal of a scheduler ({exc}): delete it to start a new run"
        raise ConfigError(msg) from exc
    return msgspec.structs.replace(directory, epoch=directory.epoch + 1)


class Scheduler:
    """Scheduler of a parameter server: carries out the decisions of `SchedulerState`.

    Args:
        postoffice: Sends and receives the node's messages.
        counts: Number of servers and of workers at the beginning.
        options: Options of the whole parameter server.

    Raises:
        ConfigError: An option is invalid, or the journal cannot be used.
    """

    def __init__(self, postoffice: Postoffice, counts: tuple[int, int], options: Options) -> None:
        self._postoffice = postoffice
        self._journal = options.journal
        self._state = state = SchedulerState(
            *counts,
            replicas=options.replicas or 0,
            on_worker_loss=options.on_worker_loss or "fail",
            directory=None if options.journal is None else _read_journal(options.journal),
        )
        self._has_journal = True  # or none is wanted
        self._had_workers = state.directory is not None
        self._num_handled = 0
        if state.directory is not None:
            postoffice.set_directory(state.directory)
        handled = (NodeJoin, StopAt, Leave, Drain, Installed, Barrier, NextData, Loads, PeerLost)
        postoffice.register(
            dict.fromkeys(handled, self._handle),
            on_resend=self._resend,
            on_tick=self._tick,
            waiting=state.waiting,
        )
        self._restarted_ns: int | None = None  # when it began to receive
        self._failed_ns = 0  # when it had failed; 0 if it has not
        self._informed: set[str] = set()  # nodes that know of the failure

    @property
    def is_over(self) -> bool:
        """Whether all workers have left, or the run has failed and all nodes know."""
        directory = self._state.directory
        if self._state.failure:
            return directory is not None or self._all_know_failure()
        return self._had_workers and directory is not None and not directory.workers

    def _all_know_failure(self) -> bool:
        """Return whether all absent nodes know why the run failed, or LATE_S has passed since."""
        now_ns = self._postoffice.van.clock.now_ns()
        self._failed_ns = self._failed_ns or now_ns
        unaware = {*self._state.absent} - self._informed - self._postoffice.links.losses.keys()
        return not unaware or now_ns - self._failed_ns > LATE_S * 1e9

    @property
    def failure(self) -> str:
        """Error that ended the run; empty while it continues."""
        return self._state.failure

    @property
    def directory(self) -> Directory | None:
        """The current directory: nodes and servers of shards; None before all have joined."""
        return self._state.directory

    def release_lost(self) -> None:
        """Stop waiting for new processes of lost workers."""
        self._act(self._state.release_lost())

    def _tick(self) -> None:
        """Treat nodes that did not reconnect to a restarted scheduler in time as lost."""
        self._postoffice.waits.hold(
            lambda: (self._state.awaited(), self._state.waiting(), self._num_handled)
        )
        if self._state.missing:
            now_ns = self._postoffice.van.clock.now_ns()
            if self._restarted_ns is None:
                self._restarted_ns = now_ns
            if now_ns - self._restarted_ns > RETURN_S * 1e9:
                self._act(self._state.drop_missing())

    def _resend(self) -> None:
        self._publish()
        self._act(self._state.calls())

    def _handle(self, delivery: Delivery) -> None:
        self._num_handled += 1
        try:
            self._act(self._decide(delivery))
            if self._state.failure:
                self._informed.add(delivery.sender)
                self._postoffice.send(delivery.sender, Failure(self._state.failure))
            if isinstance(delivery.message, NodeJoin) and self._state.directory is not None:
                here = Here(self._state.directory)
                self._postoffice.send(delivery.sender, here, answers=delivery.id)
        except StaleError as exc:
            failure = Failure(str(exc), is_removed=True, life=delivery.incarnation)
            self._postoffice.send(delivery.sender, failure)
        except BraidError as exc:
            self._postoffice.send(delivery.sender, RequestRefused(str(exc)), answers=delivery.id)

    def _decide(  # noqa: C901, PLR0911 - one for each message
        self, delivery: Delivery
    ) -> list[Instruction]:
        role, number = split_node(delivery.sender)
        asker, life = (delivery.sender, delivery.id), delivery.incarnation
        state, is_server = self._state, role == "server"
        if role == "worker" and not isinstance(delivery.message, PeerLost | Leave):
            state.check_worker(number, life)
        match delivery.message:
            case NodeJoin(address, start, tables, epoch):
                if differs := state.check_tables(delivery.sender, tables):
                    return differs
                if is_server:
                    return state.server_joins(number, address)
                if role == SPARE:
                    return state.spare_joins(number)
                return state.worker_joins(number, start, life, was_member=epoch >= 0)
            case StopAt(clock):
                return state.stop_at(clock)
            case Leave(""):
                return state.worker_leaves(number, life)
            case Drain():
                return state.server_leaves(number, asker)
            case Installed(shard, server, since):
                return state.installed(shard, server, since)
            case Barrier(name, members, step):
                return state.barrier(name, *asker, frozenset(members), step)
            case NextData(name, num_shards, finished):
                return state.next_data(name, num_shards, asker, finished)
            case Loads(weights):
                return state.balance(number, weights)
            case PeerLost(reason=reason) | Leave(reason):
                if role == SPARE:
                    return state.spare_lost(number)
                lost = state.server_lost if is_server else partial(state.worker_lost, life=life)
                return lost(number, reason)
        return []

    def _act(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case PublishDirectory():
                    self._publish()
                case CallSpare(spare, worker):
                    self._postoffice.send(f"{SPARE}:{spare}", Called(worker))
                case StopWorkers(clock):
                    for node in self._postoffice.van.peers:
                        self._postoffice.send(node, StopAt(clock))
                case ReleaseNodes(requests):
                    for node, request in requests:
                        self._postoffice.send(node, Released((0,)), answers=request)
                case Issue((node, request), shard):
                    dealt = Dealt((0,), -1 if shard is None else shard)
                    self._postoffice.send(node, dealt, answers=request)
                case FailRun(text):
                    self._informed.update(self._postoffice.van.peers)
                    for node in self._postoffice.van.peers:
                        self._postoffice.send(node, Failure(text))

    def _publish(self) -> None:
        directory = self._state.directory
        if directory is None:
            return
        self._had_workers = self._had_workers or bool(directory.workers)
        if directory is not self._postoffice.directory:
            self._write(directory)
        if self._state.failure:
            self._act([FailRun(self._state.failure)])
        self._postoffice.publish(directory)

    def _write(self, directory: Directory) -> None:
        """Replace the journal atomically, so that a reader sees the old one or the new one.

        If the disk is full, the run continues without a journal: a scheduler that began with an old
        directory would route requests to servers that have other shards by now.
        """
        if self._journal is None:
            return
        new = self._journal.with_suffix(".new")
        try:
            with new.open("wb") as file:
                file.write(msgspec.json.encode(directory))
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._journal)
        except OSError as exc:
            for path in (new, self._journal):
                with contextlib.suppress(OSError):
                    path.unlink()
            if self._has_journal:
                LOG.warning(
                    "braid: the scheduler cannot write its journal %s (%s) and goes on without: it "
                    "cannot be restarted until a later write succeeds",
                    self._journal,
                    exc.strerror or exc,
                )
            self._has_journal = False
            return
        if not self._has_journal:
            LOG.warning("braid: the scheduler has written its journal %s again", self._journal)
        self._has_journal = True
