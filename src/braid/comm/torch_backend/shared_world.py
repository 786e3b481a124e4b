"""Shared memory for torch.distributed: how a process becomes a rank through torch's store.

Problem: `init_process_group` may be the first call of a program, under any launcher or none, with
any rendezvous; or the program has called `braid.init()` before. Then the program makes hundreds of
groups. All of them must use the same shared memory.

Idea: the first group of a process opens a `SharedWorld`. Every group whose ranks all belong to it
is selected from its world, which costs a few words of memory. A shared world is made in one of
three ways:

    braid.init() was called          its world is used, and stays open when the last process
                                     group is destroyed
    `braid run` started this rank    the process joins the job: black box, launcher's reports of
                                     deaths, error block
    otherwise                        ranks meet through torch's store

A shared world is closed with its last group, or at exit, since a communication thread that still
runs then would abort the interpreter.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, NamedTuple

import torch

from braid.comm import Group
from braid.comm.api.group import FIRST_DEADLINE_S
from braid.comm.engines.background_poller import BackgroundPoller
from braid.comm.torch_backend.backward import Backward
from braid.errors import ConfigError, message_of
from braid.runtime.rendezvous import JobEnvironment, wants_portable
from braid.runtime.rendezvous.membership import join_job
from braid.runtime.rendezvous.network import network_of_program
from braid.runtime.rendezvous.rank import claim, join
from braid.runtime.store import PrefixStore, Store
from braid.runtime.store.torch_store import TorchStore

__all__ = ["GroupRendezvous", "SharedWorld", "SharedWorlds"]


class GroupRendezvous(NamedTuple):
    """Rendezvous of the members of a group.

    Attributes:
        store: torch's store, with this group's prefix.
        ranks: Global ranks of the members.
        rank: Index of this rank among them.
        timeout_s: Seconds to wait for the other members.
    """

    store: Any
    ranks: tuple[int, ...]
    rank: int
    timeout_s: float


class SharedWorld:
    """Shared memory of some ranks, and the groups that were made in it.

    Attributes:
        ranks: Global ranks, as torch counts them.
        world: Group of all these ranks.
        poller: Poller of operations in progress.
        backward: Futures that are requested inside backward.
        spare_cores: Whether every rank can use a core for communication besides the cores for its
            computation.

    Args:
        ranks: Global ranks, as torch counts them.
        world: Group of all these ranks; belongs to `owner`.
        owner: Resource to close last; None if the program owns the world.
        store: Store in which members of new groups meet. The stores that torch passes for new
            groups have the groups' names as prefixes, and torch 2.14 may name one group
            differently on each rank: after `new_group(use_local_synchronization=True)` of some
            ranks.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        world: Group,
        owner: _LauncherJob | _StoreMeeting | None,
        store: Store,
    ) -> None:
        self.ranks = ranks
        self.world = world
        rank = world.context.rank
        self.poller = BackgroundPoller(f"braid-torch_backend-{rank}")
        self.backward = Backward()
        self.spare_cores = _has_spare_cores(len(ranks))
        self._owner = owner
        self._store = store
        self._groups: list[Group] = []
        self._meetings: dict[str, tuple[int, str]] = {}  # number and last name, by set of ranks
        self._pid = os.getpid()
        atexit.register(self.close)

    @property
    def groups(self) -> list[Group]:
        """Groups that are in use."""
        return self._groups

    def select(self, meeting: GroupRendezvous) -> Group:
        """Return a new group of ranks of this world; called by its members only."""
        ranks = [self.ranks.index(rank) for rank in meeting.ranks]
        key = "_".join(map(str, ranks))
        number, previous = self._meetings.get(key, (0, ""))
        name = f"{key}, {number + 1}"
        timeout_s = min(meeting.timeout_s, FIRST_DEADLINE_S)
        group = self.world.select(
            ranks, self._store, name=name, previous=previous, timeout_s=timeout_s
        )
        self._meetings[key] = (number + 1, name)
        self._groups.append(group)
        return group

    def close_group(self, group: Group) -> bool:
        """Close a group, and this world after its last group; return whether it was the last."""
        if group in self._groups:
            self._groups.remove(group)
            if os.getpid() == self._pid:
                group.close()
        if self._groups:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Release all resources. Idempotent; nothing happens in a forked child."""
        atexit.unregister(self.close)
        owner, self._owner = self._owner, None
        if os.getpid() != self._pid:
            return
        self.poller.close()
        failure = _failure()
        for group in self._groups:
            if failure:
                group.abort(failure)
            group.close()
        self._groups.clear()
        if owner is not None:
            owner.close()


class SharedWorlds:
    """Registry of the shared worlds of this process, by their global ranks.

    Attributes:
        program: World that the program made with `braid.init()`; None without one.
    """

    def __init__(self) -> None:
        self.program: Group | None = None
        self._shared_worlds: dict[tuple[int, ...], SharedWorld] = {}

    def open(self, meeting: GroupRendezvous) -> tuple[SharedWorld, Group]:
        """Return the shared world and a new group for `meeting`; a collective call of its ranks.

        Raises:
            RendezvousError: Some ranks did not come, or one came twice.
            ConfigError: The ranks are on several hosts without a common secret.
        """
        shared_world = next(
            (h for h in self._shared_worlds.values() if set(meeting.ranks) <= set(h.ranks)), None
        )
        if shared_world is None:
            shared_world = self._shared_worlds[meeting.ranks] = _new_shared_world(
                meeting, self.program
            )
        try:
            return shared_world, shared_world.select(meeting)
        except BaseException:
            self._drop(shared_world)
            raise

    def close_group(self, shared_world: SharedWorld, group: Group) -> None:
        """Close a group, and its shared world if the group was its last one."""
        if shared_world.close_group(group):
            self._shared_worlds.pop(shared_world.ranks, None)

    def _drop(self, shared_world: SharedWorld) -> None:
        if not shared_world.groups:
            shared_world.close()
            self._shared_worlds.pop(shared_world.ranks, None)


class _LauncherJob:
    """Membership of this process in a job that `braid run` started."""

    def __init__(self, environment: JobEnvironment, timeout_s: float) -> None:
        self._member = join_job(environment, timeout_s=timeout_s)
        self.world = Group.world(self._member.context, self._member.transport)

    def close(self) -> None:
        self._member.report_uncaught()
        if self._member.failed:
            self.world.abort(self._member.failure)
        self.world.close()
        self._member.close()


class _StoreMeeting:
    """Ranks that met through torch's store, without braid's launcher."""

    def __init__(self, meeting: GroupRendezvous, store: Store) -> None:
        secret, network = network_of_program()
        context, self._transport = join(
            store,
            meeting.rank,
            len(meeting.ranks),
            timeout_s=meeting.timeout_s,
            portable=wants_portable(),
            secret=secret,
            network=network,
        )
        try:
            self.world = Group.world(context, self._transport)
        except BaseException:
            self._transport.close()
            raise

    def close(self) -> None:
        failure = _failure()
        if failure:
            self.world.abort(failure)
        self.world.close()
        if not failure:
            self._transport.announce_end()
        self._transport.close()


def _new_shared_world(meeting: GroupRendezvous, program: Group | None) -> SharedWorld:
    size = len(meeting.ranks)
    store: Store = TorchStore(meeting.store, meeting.timeout_s)
    joining = claim(PrefixStore("braid", store), meeting.rank)
    store = PrefixStore(f"braid/join-{joining}", store)  # separate from the keys of earlier joins
    if program is not None and (program.rank, program.size) == (meeting.rank, size):
        return SharedWorld(meeting.ranks, program, None, store)
    environment = _environment()
    if environment is not None and (environment.rank, environment.world_size) == (
        meeting.rank,
        size,
    ):
        joined = _LauncherJob(environment, meeting.timeout_s)
        return SharedWorld(meeting.ranks, joined.world, joined, store)
    met = _StoreMeeting(meeting, store)
    return SharedWorld(meeting.ranks, met.world, met, store)


def _failure() -> str:
    """Return the exception that is ending the program; empty if there is none."""
    exc = getattr(sys, "last_value", None)  # the interpreter sets it before exit handlers run
    return "" if exc is None else f"{type(exc).__name__}: {message_of(exc)}"


def _has_spare_cores(size: int) -> bool:
    """Return whether one core per rank is spare, if all ranks are on this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) >= size * (torch.get_num_threads() + 1)


def _environment() -> JobEnvironment | None:
    """Return the settings from braid's launcher; None without it."""
    try:
        environment = JobEnvironment.from_os()
    except ConfigError:  # torch does not need them when rank and size are passed
        return None
    return environment if environment.launched_by == "braid" else None
