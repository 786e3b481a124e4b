"""The session, which `hvd.init()` creates and `hvd.shutdown()` removes: the only global state.

Horovod's functions do not take a group but use the process in which they run. So they need a global
state, which is in this module only.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from braid import context
from braid.comm import Group
from braid.compat.horovod.common.exceptions import NotInitializedError, translated
from braid.compat.horovod.environment import HorovodEnvironment, write_search
from braid.compat.horovod.fusion import Autotuner, Fusion, Request, Stall
from braid.compat.horovod.fusion.batching import FusedBatch
from braid.compat.horovod.fusion.entry import Result, TensorTableEntry
from braid.errors import CommError, ConfigError
from braid.runtime.rendezvous import JobEnvironment, NewEpoch

__all__ = ["Session", "SessionMember", "renew", "session", "start", "started", "stop"]

GLOBAL = 0  # number of the set of all ranks
NEW_SET = "new process set"


class SessionMember:
    """This rank as a member of one process set.

    Args:
        number: Number of the set.
        ranks: Global ranks.
        engine: Engine for the set's operations; None on ranks outside of the set.
    """

    def __init__(self, number: int, ranks: Sequence[int], engine: Fusion | None) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self._engine = engine
        self._counts: dict[str, itertools.count[int]] = defaultdict(itertools.count)

    @property
    def included(self) -> bool:
        """Whether this rank is in the set."""
        return self._engine is not None

    @property
    def engine(self) -> Fusion:
        """Engine for the operations of the set.

        Raises:
            ConfigError: This rank is not in the set.
        """
        if self._engine is None:
            msg = (
                f"this rank is not in process set {self.number} "
                f"({', '.join(map(str, self.ranks))}) so it cannot use this set: call the "
                "operation on ranks of the set only"
            )
            raise ConfigError(msg)
        return self._engine

    def name(self, kind: str, label: Any) -> str:
        """Return the full name of an operation; if the program passes no name, it gets a number.

        All ranks must start operations without a name in the same order.

        Raises:
            ConfigError: The name is not a string, or cannot be encoded as UTF-8.
        """
        if not isinstance(label, str | None):
            msg = f"name of {kind} must be text or None, got {label!r}"
            raise ConfigError(msg)
        if label and not label.isascii():
            try:
                label.encode()
            except UnicodeEncodeError as error:
                msg = f"name {label!r} for {kind} cannot be written as UTF-8: {error}"
                raise ConfigError(msg) from error
        return f"{kind}.{label}" if label else f"{kind}.noname.{next(self._counts[kind])}"

    def restart_names(self) -> None:
        """Number operations without a name from 0 again; all ranks do so together."""
        self._counts.clear()


class Session:
    """State after `hvd.init()`: engines of all process sets, and gradients collected for them.

    Args:
        group: Group of all ranks.
        environment: Values of HOROVOD_*; all ranks use the first rank's values.
    """

    def __init__(self, group: Group, environment: HorovodEnvironment) -> None:
        self.group = group
        self.environment = environment = HorovodEnvironment(
            **group.objects.broadcast(dataclasses.asdict(environment))
        )
        self.job = JobEnvironment.from_os()
        self.timeline = ""
        mine = (self.job.local_rank, self.job.node_rank)
        places = group.objects.all_gather(mine)
        alike = sorted(node for local, node in places if local == mine[0])
        here = sum(node == mine[1] for _, node in places)
        self.local_size = here if self.job.elastic else self.job.local_world_size
        self.cross = alike.index(mine[1]), len(alike)
        self.spans_hosts = len({node for _, node in places}) > 1
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        free = torch.cuda.is_available() or self.job.local_world_size < (cores or 1)
        self.free_cores = min(group.objects.all_gather(free))
        self.homogeneous = len(set(Counter(node for _, node in places).values())) == 1
        self.num_joins = 0  # calls of `join` that have returned, equal on all ranks
        self.collected: set[Callable[[], None]] = set()  # functions that submit collected requests
        self._members: dict[int, SessionMember] = {}
        self.added_sets: list[Any] = []  # by the program, in order; see `process_sets`
        self._next_number = GLOBAL
        direct = group.split(0)
        assert direct is not None  # the group has all ranks
        self.direct = direct  # for messages that are not negotiated
        whole = self._add(group, range(group.size))
        whole.engine.operations.prefer(_NewSet(self))
        if environment.timeline:
            whole.engine.timeline.start(mark_cycles=environment.timeline_mark_cycles)
            whole.engine.timeline.path_at_end = Path(environment.timeline)

    @property
    def is_newcomer(self) -> bool:
        """Whether this process is new in an elastic run, and the members have not accepted it."""
        return self.job.elastic == "newcomer" and context.membership().is_newcomer

    @property
    def whole(self) -> SessionMember:
        """Process set of all ranks."""
        return self._members[GLOBAL]

    def member(self, number: int) -> SessionMember:
        """Return this rank's state in the process set with a number.

        Raises:
            ConfigError: The process set does not exist.
        """
        if number not in self._members:
            msg = (
                f"process set {number} does not exist: use one of {sorted(self._members)}, or "
                "call hvd.add_process_set first"
            )
            raise ConfigError(msg)
        return self._members[number]

    def numbers(self) -> list[int]:
        """Numbers of all process sets."""
        return sorted(self._members)

    def add(self, ranks: Sequence[int]) -> SessionMember:
        """Add a process set; all ranks call this.

        Raises:
            CommError: Ranks pass different sets.
        """
        text = ",".join(map(str, ranks))
        engine = self.whole.engine
        number = engine.submit(Request(NEW_SET, NEW_SET, text=text), None).wait()
        assert isinstance(number, int)
        return self._members[number]

    def refuse_set(self, reason: str) -> None:
        """Fail the next `add` on all ranks for a reason: this rank's call has failed."""
        with contextlib.suppress(CommError):  # the engine has ended
            refused = Request(NEW_SET, NEW_SET, refusal=reason[:1000])
            self.whole.engine.refuse(refused)

    def remove(self, number: int) -> None:
        """Remove the process set with a number; all ranks call this."""
        member = self._members.pop(number)
        if member.included:
            self._end(member, f"process set {number} has been removed")
            member.engine.group.close()

    def close(self) -> None:
        """End all engines."""
        members = [member for member in reversed(self._members.values()) if member.included]
        for member in members:
            self._end(member)
        for group in (*(member.engine.group for member in members), self.direct):
            group.close()
        self._members.clear()

    def _end(self, member: SessionMember, reason: str = "") -> None:
        """End an engine; write the log of an unfinished search."""
        member.engine.close(reason)
        tuner = member.engine.tuner
        if tuner is not None and tuner.samples:
            self._write_search(member.number, tuner)

    def _add(self, parent: Group, ranks: Sequence[int]) -> SessionMember:
        """Add a set of ranks of `parent`; all ranks of `parent` call this."""
        number = self._next_number
        self._next_number += 1
        engine = None
        part = parent.split(0 if parent.rank in ranks else None)
        if part is not None:
            engine = Fusion(
                part,
                self.environment.options(spans_hosts=self.spans_hosts, free_cores=self.free_cores),
                on_stall=partial(_report, part.rank),
                on_tuned=partial(self._on_tuned, number),
                on_wait=self._submit_collected,
                on_choice=self._notes,
                on_joined=partial(self._restart_names, number),
            )
        self._members[number] = SessionMember(number, ranks, engine)
        return self._members[number]

    def _submit_collected(self) -> None:
        """Submit the collected requests of all sets, since other ranks may wait for them."""
        for submit in tuple(self.collected):
            self.collected.discard(submit)
            submit()

    def _restart_names(self, number: int) -> None:
        """Restart numbering: a rank that has joined has started fewer operations than others."""
        if number in self._members:
            self._members[number].restart_names()

    def _on_tuned(self, number: int, tuner: Autotuner) -> None:
        best = tuner.best
        _print(
            f"best of {len(tuner.samples)} samples: {best.threshold_bytes} "
            f"bytes, {best.cycle_time_s * 1e3:g} ms"
        )
        self._write_search(number, tuner)

    def _write_search(self, number: int, tuner: Autotuner) -> None:
        """Write the log of a search if requested; print a message if it cannot be written."""
        if not self.environment.autotune_log:
            return
        path = Path(self.environment.autotune_log)
        if number != GLOBAL:  # each process set has a separate search
            path = path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            write_search(path, tuner)
        except OSError as error:
            _print(f"autotune's log cannot be written: {error}")

    def _notes(self, kind: str, name: str) -> None:
        if self.group.rank == 0 and self.environment.log_level in {"trace", "debug", "info"}:
            by_hosts = kind == "all_reduce" and self.environment.hierarchical_allreduce
            how = f"{name}, by hosts" if by_hosts and self.spans_hosts else name
            _print(f"{kind}: {how}")


class _NewSet:
    """Operation that adds a process set in the engine's thread, in the same order on all ranks."""

    name = kind = NEW_SET

    def __init__(self, session: Session) -> None:
        self._session = session

    def suits(self, batch: FusedBatch) -> bool:
        """Return whether the request adds a process set."""
        return batch.request.kind == NEW_SET

    # the operation has no tensors
    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:  # noqa: ARG002
        """Divide the engine's group."""
        ranks = [int(rank) for rank in batch.request.text.split(",")]
        # this class is a part of the session
        member = self._session._add(self._session.whole.engine.group, ranks)  # noqa: SLF001
        return [member.number]


class _SessionHolder:
    def __init__(self) -> None:
        self.session: Session | None = None


_HOLDER = _SessionHolder()


def session() -> Session:
    """Return the session.

    Raises:
        NotInitializedError: `hvd.init()` has not been called.
    """
    if _HOLDER.session is None:
        msg = "hvd.init() has not been called: call it once at the start of the program"
        raise NotInitializedError(msg)
    return _HOLDER.session


def started() -> bool:
    """Return whether there is a session."""
    return _HOLDER.session is not None


def start(group: Group | None = None, environment: HorovodEnvironment | None = None) -> Session:
    """Return the session; create it if it does not exist.

    Args:
        group: Group of all ranks; the group of `braid.init()` when None.
        environment: Values of HOROVOD_*; read when None.
    """
    if _HOLDER.session is None:
        group = context.init() if group is None else group
        _HOLDER.session = Session(group, environment or HorovodEnvironment.from_os())
        atexit.register(stop)
    return _HOLDER.session


def renew(num_commits: int, timeout_s: float, limit_s: float | None) -> NewEpoch:
    """Join the next epoch of an elastic run, with a new session; all members call this.

    Args:
        num_commits: Number of commits that this process's state includes; -1 without state.
        timeout_s: Seconds to wait for the members of the epoch.
        limit_s: Seconds to wait until the epoch begins; None for no limit.

    Raises:
        HorovodInternalError: A member of the epoch was lost: call this again for the next epoch.
        CommError: No epoch follows.
    """
    stop()
    group, epoch = context.next_epoch(num_commits, timeout_s, limit_s=limit_s)
    with translated():
        start(group)
    return epoch


def stop() -> None:
    """End the session, if there is one."""
    session, _HOLDER.session = _HOLDER.session, None
    if session is not None:
        atexit.unregister(stop)
        session.close()


def _print(text: str) -> None:
    """Print a line to stderr."""
    print(f"braid.compat.horovod: {text}", file=sys.stderr, flush=True)


def _report(rank: int, stall: Stall) -> None:
    """Print a stall on the first rank; all ranks receive it."""
    if rank == 0:
        _print(str(stall))
