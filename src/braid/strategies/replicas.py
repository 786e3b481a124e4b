"""The replicas of this process: ranks of one group, on threads if there are several.

A strategy is a group and a replica is one of its ranks. So all strategies share one way of
averaging gradients, the engine of `AveragingOptimizer`; what differs is where ranks run.

    OneDeviceStrategy               a group of one
    MirroredStrategy                ranks on threads, over memory that they share
    MultiWorkerMirroredStrategy     one rank in each process: the group of `braid.init()`
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from braid.comm import Group
from braid.errors import PeerLostError, StaleError
from braid.parallel.data_parallel.replicas.parallel_apply import parallel_apply
from braid.runtime.clock import MonotonicClock
from braid.runtime.events import Recorder
from braid.runtime.store import HashStore
from braid.runtime.transport import Fabric, RankContext
from braid.strategies.values import PerReplica

__all__ = ["LocalReplicas", "OneRank", "ThreadReplicas"]

GRACE_S = 10.0  # replicas wait this long for a replica that has ended its step, as ranks do


class LocalReplicas(Protocol):
    """Replicas of this process. In all methods `index` is a replica's number in this process.

    Attributes:
        devices: Device of each replica of this process.
        size: Number of replicas of all processes.
        across: Group of the processes; None with a single process.
        is_usable: Whether the groups that `run` passes to replicas can be used again.
    """

    devices: tuple[torch.device, ...]
    size: int
    across: Group | None
    is_usable: bool

    def run(self, call: Callable[[int, Group], Any]) -> list[Any]:
        """Call `call(index, group)` for each replica of this process, in parallel."""

    def merge(self, index: int, args: Any, call: Callable[[list[Any]], Any]) -> Any:
        """Call `call(values)` once, with the `args` of all replicas of this process."""

    def end_step(self, index: int) -> None:
        """Record that a replica has returned from its step, and does not call `merge` any more."""

    def close(self) -> None:
        """End the replicas."""


class OneRank:
    """One replica in this process, which is a rank of `group`.

    Args:
        device: Device of the replica.
        group: Group of all replicas.
    """

    is_usable = True

    def __init__(self, device: torch.device, group: Group) -> None:
        self.devices: tuple[torch.device, ...] = (device,)
        self.size = group.size
        self.across: Group | None = group if group.size > 1 else None
        self._group = group

    def run(self, call: Callable[[int, Group], Any]) -> list[Any]:
        """Call a function in parallel, once for each replica; see `LocalReplicas.run`."""
        return [call(0, self._group)]

    def merge(self, index: int, args: Any, call: Callable[[list[Any]], Any]) -> Any:
        """Call a function once, with the values of all replicas; see `LocalReplicas.merge`."""
        del index
        return call([args])

    def end_step(self, index: int) -> None:
        """Record that a replica has returned from its step; see `LocalReplicas.end_step`."""

    def close(self) -> None:
        """End the replicas; see `LocalReplicas.close`."""


class ThreadReplicas:
    """Replicas on threads of this process; a single replica runs on the calling thread.

    If a replica fails, the waits of all other replicas fail, and its exception is raised. A replica
    that has ended its step leaves the group after `GRACE_S`. Then replicas that wait for it fail;
    replicas that still compute continue. All replicas join a new group at the next run.

    Args:
        devices: Device of each replica; one may occur several times.
    """

    across: Group | None = None
    is_usable = True

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.size = len(self.devices)
        self._fabric: Fabric | None = None
        self._groups: list[Group] = []
        self._meeting = MergeCalls(self.size)
        self._changed = threading.Condition()
        self._num_ended = 0

    def run(self, call: Callable[[int, Group], Any]) -> list[Any]:
        """Call a function in parallel, once for each replica; see `LocalReplicas.run`."""
        if self._fabric is None:
            self._meet()
        fabric, failures = self._fabric, list[BaseException]()
        self._meeting = MergeCalls(self.size)
        self._num_ended = 0
        assert fabric is not None, "the replicas have met"

        def run_one(index: int) -> Any:
            try:
                return call(index, self._groups[index])
            except BaseException as exc:  # noqa: BLE001 - the first one is raised by the caller
                failures.append(exc if self.is_usable else _named(exc))
                fabric.lose(index, f"raised {type(exc).__name__}: {exc}")
                self._meeting.leave()
                self._end(self.size)
                return None

        results = parallel_apply(
            [run_one] * self.size, [(i,) for i in range(self.size)], None, self.devices
        )
        if failures:
            self.close()
            raise failures[0]
        return results

    def merge(self, index: int, args: Any, call: Callable[[list[Any]], Any]) -> Any:
        """Call a function once, with the values of all replicas; see `LocalReplicas.merge`."""
        return self._meeting.merge(index, args, call)

    def end_step(self, index: int) -> None:
        """Record that a replica has returned from its step; see `LocalReplicas.end_step`."""
        self._meeting.leave()
        self._end(1)
        with self._changed:
            everybody = self._changed.wait_for(lambda: self._num_ended >= self.size, GRACE_S)
        fabric = self._fabric
        if not everybody and fabric is not None:
            self.is_usable = False
            fabric.lose(index, "its step has ended", on_purpose=True)

    def close(self) -> None:
        """End the replicas; see `LocalReplicas.close`."""
        for group in self._groups:
            group.close()
        self._groups = []
        if self._fabric is not None:
            self._fabric.close()
        self._fabric = None
        self._meeting = MergeCalls(self.size)
        self.is_usable = True

    def _end(self, count: int) -> None:
        """Count the replicas that have ended their steps."""
        with self._changed:
            self._num_ended += count
            self._changed.notify_all()

    def _meet(self) -> None:
        """Make the group, as ranks of several processes do."""
        clock, store, size = MonotonicClock(), HashStore(), self.size
        fabric = self._fabric = Fabric(size, clock)

        def join(rank: int) -> Group:
            transport = fabric.transports[rank]
            recorder = Recorder(clock=clock)
            context = RankContext(rank, size, clock, recorder, transport.health, store)
            return Group.world(context, transport)

        self._groups = parallel_apply([join] * size, [(i,) for i in range(size)], None)


def _named(exc: BaseException) -> BaseException:
    """Return the error of a replica that waits for a replica that has ended its step."""
    if not isinstance(exc, PeerLostError):
        return exc
    msg = (
        f"a replica waits for another one, which ended its step {GRACE_S:g} s ago: call backward, "
        f"optimizer.step and collectives in all replicas or in none ({exc})"
    )
    error = StaleError(msg)
    error.__cause__ = exc
    return error


class MergeCalls:
    """Collects the arguments of all replicas' threads, and calls a function once with them.

    Args:
        size: Number of threads.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._args: dict[int, Any] = {}
        self._number = 0  # of the meetings that are over
        self._is_over = False
        self._outcome: tuple[Any, BaseException | None] = None, None

    def merge(self, index: int, args: Any, call: Callable[[list[Any]], Any]) -> Any:
        """Call a function with all threads' arguments, and return its result to all.

        Raises:
            StaleError: Another replica has failed, or has ended its step.
            BaseException: The function's own exception, in all threads.
        """
        with self._changed:
            number = self._number
            self._args[index] = args
            if len(self._args) == self._size:
                arguments = [self._args[i] for i in range(self._size)]
                self._args = {}
                try:
                    self._outcome = call(arguments), None
                except BaseException as exc:  # noqa: BLE001 - raised by each replica
                    self._outcome = None, exc
                self._number += 1
                self._changed.notify_all()
            while number == self._number:
                if self._is_over:
                    msg = (
                        "merge_call was called in one replica after another had ended its step: "
                        "call it in all replicas"
                    )
                    raise StaleError(msg)
                self._changed.wait()
            result, error = self._outcome
        if error is not None:
            raise error
        return result

    def leave(self) -> None:
        """Make all threads that wait in `merge` raise, since one thread has ended its step."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


def merged(args: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return one `PerReplica` for each argument, from the arguments of all replicas."""
    return [PerReplica(values) for values in zip(*args, strict=True)]
