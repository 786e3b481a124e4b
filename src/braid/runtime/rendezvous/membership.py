"""Makes this process a rank of its job.

    environment -> store, events, control socket -> shared memory of all ranks -> RankContext

Under `braid run` the launcher serves the store and reports failures to ranks. Under torchrun (or a
launcher with the same variables) torch's store is used. A single process is the only rank of its
job.

In an elastic run the launcher sends the list of members of each epoch (`next_epoch`). Each epoch
has a new transport and a new context, so no message of an earlier epoch can arrive.

A rank that closes its membership has *left*; only ranks that still need something from it fail. A
rank that ends by an exception or by `sys.exit` with a code other than 0 has *failed*: it reports
this to the launcher before the interpreter shuts down, which may take long.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from braid._version import __version__
from braid.errors import (
    CommTimeout,
    ConfigError,
    PeerLostError,
    RendezvousError,
    encodable,
    message_of,
)
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.diagnose.tracebacks import parse_error
from braid.runtime.events import Recorder
from braid.runtime.rendezvous.control import ControlClient, Exiting, NewEpoch, RankFailed
from braid.runtime.rendezvous.environment import JobEnvironment
from braid.runtime.rendezvous.exit_hook import ExitHook
from braid.runtime.rendezvous.job_store import dial_store, torch_store
from braid.runtime.rendezvous.last_epoch import MEET_S, agree_on_last_epoch
from braid.runtime.rendezvous.launcher_link import LauncherLink, open_link
from braid.runtime.rendezvous.launcher_news import NO_EPOCH, LauncherNews
from braid.runtime.rendezvous.network import network_of
from braid.runtime.rendezvous.rank import JoinedRank, claim, join
from braid.runtime.store import FileStore, HashStore, PrefixStore, Store, StoreClient
from braid.runtime.transport import Health
from braid.runtime.wire import Connection, Secret

if TYPE_CHECKING:
    from braid.runtime.rendezvous.survivors import Survivor

__all__ = ["Membership", "join_job"]

# how the loss of a member shows; without a launcher, also as a time-out
LOSSES = (PeerLostError, CommTimeout, RendezvousError)
DEBUGGING_S = 7 * 86400.0  # long enough for a person at a debugger's prompt


class _Parts(NamedTuple):
    """Resources of a rank that depend on its launcher."""

    secret: Secret | None
    store: Store
    recorder: Recorder | None
    link: LauncherLink | None
    launcher: LauncherNews | None
    sockets: tuple[Connection | ControlClient, ...]
    closers: contextlib.ExitStack


class Membership:
    """This process as a rank of its job; a context manager.

    Attributes:
        environment: Settings from the launcher.
        context: Context for all objects that communicate; a new one in each epoch.
        transport: Transport between the ranks of the job; a new one in each epoch.
        epoch: Number of the current epoch of an elastic run; -1 in other runs.
        num_agreements: Number of times that members have agreed on an epoch without the launcher;
            they do not train in such an epoch.
        num_trainings: Number of elastic trainings (`braid.elastic`) that this process has started.
        control: Control connection to braid's launcher; None without braid's launcher.
        failed: Whether an exception, or `sys.exit` with a code other than 0, ends this process.
        failure: The exception that ends this process, as `type: message`, or its exit code; empty
            without one.
    """

    def __init__(
        self,
        environment: JobEnvironment,
        joined: JoinedRank,
        parts: _Parts,
        epoch: int,
    ) -> None:
        self.environment = environment
        self.context, self.transport = joined
        self._parts = parts
        self.epoch = epoch
        self._link = parts.link
        self.control = parts.link.control if parts.link is not None else None
        self._launcher = parts.launcher
        self._survivor = _survivor(environment, joined) if parts.link is None else None
        self._closers = parts.closers
        self.num_agreements = 0
        self.num_trainings = 0
        self.failed = False
        self.failure = ""
        self._closed = False
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        self._shown = getattr(sys, "last_value", None)
        self._exit_hook = ExitHook(self._on_exit) if self.control is not None else None
        atexit.register(self.close)

    @property
    def stop_reason(self) -> str:
        """Reason for which the launcher asks this rank to save and end; empty if it does not."""
        if self._launcher is None:
            return ""
        self.context.health.collect()
        return self._launcher.stop_reason

    @property
    def has_lost_launcher(self) -> bool:
        """Whether this process was started by braid's launcher, and the launcher is gone."""
        if self.control is None:
            return False
        self.context.health.collect()
        return not self.control.connected

    @property
    def is_newcomer(self) -> bool:
        """Whether this process waits alone until the members of an elastic run take it in."""
        return self.environment.elastic == "newcomer" and self.epoch < 0

    @property
    def can_lose(self) -> bool:
        """Whether an elastic run could continue without a member when this epoch began."""
        return self._launcher is not None and self._launcher.epoch.can_lose

    @property
    def checkpoint_step(self) -> int:
        """Number of steps in the checkpoint with which the training begins; -1 without one."""
        if self._launcher is None or self._launcher.epoch.training != self.num_trainings:
            return -1
        return self._launcher.epoch.checkpoint_step

    @property
    def pauses(self) -> bool:
        """Whether the launcher has asked for a call of `next_epoch` after the current step."""
        if self._launcher is None:
            return False
        self.context.health.collect()
        return self._launcher.pauses

    def next_epoch(
        self,
        num_steps: int,
        timeout_s: float = 600.0,
        *,
        limit_s: float | None = None,
        directory: str = "",
    ) -> NewEpoch:
        """Leave this epoch of an elastic run, and join the next one; every member calls it.

        The context and the transport are replaced; close all groups that use the old ones first.

        Args:
            num_steps: Number of steps that the state of this process includes; -1 without state.
            timeout_s: Seconds to wait for the members of the next epoch.
            limit_s: Seconds to wait until the epoch begins; None for no limit.
            directory: Directory of checkpoints that all members see, in which they agree on a last
                epoch if the launcher is gone; empty for none.

        Returns:
            The epoch; this process is one of its members.

        Raises:
            SystemExit: The launcher has dismissed this process.
            ConfigError: The run is not elastic, or no file can be opened in `directory`.
            PeerLostError: The launcher ends the run, or is gone and there is no `directory`, or the
                other members continue without this process.
            CommTimeout: No epoch has begun within `limit_s`.
        """
        if self._launcher is None or not self.environment.elastic:
            msg = "the ranks of this run cannot change: start it with `braid run --min-ranks N`"
            raise ConfigError(msg)
        clock, before = self.context.clock, self._launcher.epoch
        self.transport.announce_end(0.0)
        self._launcher.ready(self.epoch, num_steps)
        self.transport.close()  # unmaps memory while other members get ready
        wait = partial(self._launcher.wait, clock=clock, limit_s=limit_s)
        entrance = _JobEntrance(self.environment, self._parts, clock, timeout_s)
        try:
            epoch, joined = entrance.join_epoch(self.epoch, num_steps, wait)
        except LOSSES:
            if not directory or self.epoch < 0 or not self._launcher.is_gone:
                raise
            losses = self.context.health.lost.values()
            lost = {before.members[loss.rank] for loss in losses if not loss.departed}
            entrance, agree = self._meet_without_launcher(entrance, directory, num_steps, lost)
            last = self._launcher.epoch.epoch
            epoch, joined = entrance.join_epoch(last, num_steps, agree, LOSSES)
        self.epoch = epoch.epoch
        self.context, self.transport = joined
        return epoch

    def _meet_without_launcher(
        self, entrance: _JobEntrance, directory: str, num_steps: int, lost: set[int]
    ) -> tuple[_JobEntrance, Callable[[int], NewEpoch]]:
        """Open a store in `directory`; return an entrance with it, and a way to agree on epochs."""
        launcher, store = self._launcher, self._parts.store
        assert launcher is not None
        path = Path(directory, f".{self.environment.run_id}.epochs")
        if not isinstance(store, FileStore):
            with contextlib.suppress(OSError):  # the store names the problem
                path.parent.mkdir(parents=True, exist_ok=True)
            store = FileStore(path, clock=entrance.clock)
            self._closers.callback(store.close)
            self._parts = self._parts._replace(store=store)

        def agree(_: int) -> NewEpoch:
            self.num_agreements += 1
            part = PrefixStore(f"agreement-{self.num_agreements}", store)
            facts = self.environment.rank, num_steps, lost | launcher.lost.keys(), entrance.clock
            launcher.epoch = agree_on_last_epoch(part, launcher.epoch, *facts)
            self._closers.callback(path.unlink, missing_ok=True)  # only members remove it
            return launcher.epoch

        return entrance._replace(parts=self._parts, timeout_s=MEET_S), agree

    def leave_epochs(self, num_steps: int, reason: str, *, is_offer: bool = False) -> None:
        """Remove this process from later epochs, before it ends; the other members continue.

        Args:
            num_steps: Number of steps that the state of this process includes.
            reason: Clause for the message to the user: "was asked to end".
            is_offer: Whether the launcher removes it only if the run can continue without it; then
                `next_epoch` raises SystemExit.
        """
        assert self._launcher is not None
        self._launcher.ready(self.epoch, num_steps, reason, is_offer=is_offer)

    def close(self) -> None:
        """Leave the job and release all resources. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.report_uncaught()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        if self._exit_hook is not None:
            self._exit_hook.close()
        atexit.unregister(self.close)
        if not self.failed and not self.transport.forked:
            if self._link is not None:  # first, so that the launcher knows who left first
                self._link.leave(self.context.health.missed)
            if not self.transport.closed:  # as it is while this rank waits for an epoch
                self.transport.announce_end()
        self.transport.close()
        if self._survivor is not None and self.failed and not self.transport.forked:
            self._survivor.linger()
        self._closers.close()

    def report_uncaught(self) -> None:
        """Report the exception that ends this process, if the program replaced `sys.excepthook`."""
        exc = getattr(sys, "last_value", None)  # set before any `sys.excepthook` is called
        trace = getattr(sys, "last_traceback", None)
        if self.failed or exc is None or exc is self._shown or trace is None:
            return
        frame = trace.tb_frame  # the program's top level: debuggers and consoles set it, too
        if frame.f_back is None and frame.f_globals.get("__name__") == "__main__":
            self._report(exc, trace)

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.failed |= exc_info[0] is not None
        self.close()

    def __repr__(self) -> str:
        rank, size = self.context.rank, self.context.world_size
        return f"Membership(rank {rank} of {size}, launched by {self.environment.launched_by})"

    def _on_exception(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        text, is_symptom = "", False
        try:
            text, is_symptom = self._report(value, trace)
        finally:
            is_plain = self._hook is sys.__excepthook__ and not isinstance(value, CommTimeout)
            if is_symptom and is_plain:  # in one line, as on the launcher's console
                sys.stderr.write(f"braid: rank {self.context.rank} ended: {self.failure}\n")
            else:
                self._hook(kind, value, trace)
        if text:
            sys.stderr.write(f"{text}\n")

    def _report(self, exc: BaseException, trace: TracebackType | None) -> tuple[str, bool]:
        """Tell the launcher, or without one the other ranks, which exception ends this process.

        Returns:
            Error block to print without a launcher, and whether another rank is the cause.
        """
        is_new, self.failed = not self.failed, True
        self.failure = f"{type(exc).__name__}: {message_of(exc)}"
        if self.transport.forked:
            return "", False
        if self.control is not None:
            self.control.send(RankFailed(**_described(exc, trace)))
        elif self._survivor is not None and is_new:
            parsed = parse_error(_described(exc, trace)["traceback"])
            return self._survivor.last_words(parsed) if parsed is not None else ("", False)
        return "", False

    def _on_exit(self, code: int, handled: BaseException | None) -> None:
        """Send the launcher the code with which `sys.exit` is ending this process."""
        if code == 0 or self._closed or self.transport.forked:
            return
        self.failed = True
        self.failure = f"exited with code {code}"
        if self.control is not None:
            described = _described(handled, handled.__traceback__) if handled is not None else {}
            self.control.send(Exiting(code, **described))


def _survivor(environment: JobEnvironment, joined: JoinedRank) -> Survivor | None:
    """Return the `Survivor` of a rank without braid's launcher; None for a single process."""
    if not environment.has_torch_store:
        return None
    from braid.runtime.rendezvous.survivors import Survivor  # noqa: PLC0415 - seldom needed

    context = joined.context
    return Survivor(
        context.rank,
        context.world_size,
        environment.launched_by,
        context.store,
        context.health,
        context.events,
        context.clock,
        context.clock.now_ns(),
    )


def _described(exc: BaseException, trace: TracebackType | None) -> dict[str, str]:
    """Return type, message, place and traceback of an exception as encodable text."""
    text = encodable("".join(traceback.format_exception(type(exc), exc, trace)))
    parsed = parse_error(text)
    return {
        "type": type(exc).__name__,
        "message": message_of(exc),
        "where": parsed.where if parsed else "",
        "traceback": text,
    }


def join_job(environment: JobEnvironment, *, timeout_s: float = 600.0) -> Membership:
    """Become a rank of the job that `environment` describes.

    Args:
        environment: Settings from the launcher.
        timeout_s: Seconds to wait for all ranks.

    Raises:
        RendezvousError: The launcher or some ranks cannot be reached in time, or another process
            has the same rank.
        ConfigError: Only some ranks are portable, or ranks of several hosts have no common secret.
    """
    clock = MonotonicClock()
    timeout_s = DEBUGGING_S if environment.debugged else timeout_s
    parts = _parts(environment, timeout_s)
    rank, epoch = environment.rank, NO_EPOCH
    with contextlib.ExitStack() as undo:
        undo.callback(parts.closers.close)
        prefix = f"join-{claim(parts.store, rank)}"
        if environment.elastic:
            _refuse_other_versions(parts.store, rank)
        entrance = _JobEntrance(environment, parts, clock, timeout_s)
        if environment.elastic == "founder":
            assert parts.launcher is not None
            parts.launcher.ready(epoch.epoch, -1)
            wait = partial(parts.launcher.wait, clock=clock)
            epoch, joined = entrance.join_epoch(epoch.epoch, -1, wait)
        elif environment.elastic:  # alone until the members take it in
            joined = entrance.join(f"alone-{rank}", 0, 1)
        else:
            joined = entrance.join(prefix, rank, environment.world_size)
        if parts.link is not None:
            parts.link.arrive()
        undo.pop_all()
    return Membership(environment, joined, parts, epoch.epoch)


def _refuse_other_versions(store: Store, rank: int) -> None:
    """Raise if this process of an elastic run has another braid or torch than the first one."""
    torch = getattr(sys.modules.get("torch"), "__version__", "no")
    mine = f"braid {__version__} and torch {torch}"
    answer = store.compare_set("versions", b"", f"{rank} {mine}".encode())
    first, _, theirs = answer.decode().partition(" ")
    if mine != theirs:
        msg = (
            f"rank {rank} has {mine}, but rank {first} has {theirs}: install the same versions on "
            "all hosts of an elastic run"
        )
        raise ConfigError(msg)


class _JobEntrance(NamedTuple):
    """Settings and resources with which a process becomes a rank."""

    environment: JobEnvironment
    parts: _Parts
    clock: Clock
    timeout_s: float

    def join(self, prefix: str, rank: int, size: int, numbers: Sequence[int] = ()) -> JoinedRank:
        """Connect to the other ranks, which exchange addresses under `prefix` in the store."""
        environment, parts = self.environment, self.parts
        # a process with the role of a lost one is alone, and hears of the others by their numbers
        known_as = environment.rank if environment.replaces >= 0 else rank
        health = Health(known_as, self.clock, debugged=environment.debugged, numbers=numbers)
        if parts.launcher is not None:
            health.register(parts.launcher)
        secret, network = network_of(environment, parts.secret)
        joined = join(
            PrefixStore(prefix, parts.store),
            rank,
            size,
            clock=self.clock,
            health=health,
            recorder=parts.recorder,
            timeout_s=self.timeout_s,
            portable=environment.portable,
            secret=secret,
            network=network,
        )
        joined.transport.keep_from_children(parts.sockets)
        return joined

    def join_epoch(
        self,
        epoch: int,
        num_steps: int,
        wait: Callable[[int], NewEpoch],
        losses: tuple[type[Exception], ...] = (PeerLostError,),
    ) -> tuple[NewEpoch, JoinedRank]:
        """Join the epoch after `epoch`, which `wait` returns, with a state after `num_steps` steps.

        If one of the errors `losses` shows that a member died during this, join the next epoch.

        Send the launcher `Ready` before this call.
        """
        launcher = self.parts.launcher
        assert launcher is not None
        while True:
            new = wait(epoch)
            rank, epoch = new.members.index(self.environment.rank), new.epoch
            with contextlib.suppress(*losses):
                joined = self.join(f"epoch-{epoch}", rank, len(new.members), new.members)
                return new, joined
            launcher.ready(epoch, num_steps)


def _parts(environment: JobEnvironment, timeout_s: float) -> _Parts:
    with contextlib.ExitStack() as stack:
        if environment.launched_by == "braid":
            return _from_launcher(environment, timeout_s, stack)
        store = torch_store(environment, timeout_s) if environment.has_torch_store else HashStore()
        return _Parts(None, store, None, None, None, (), stack.pop_all())


def _from_launcher(
    environment: JobEnvironment, timeout_s: float, stack: contextlib.ExitStack
) -> _Parts:
    secret, connection = dial_store(environment, timeout_s)
    stack.callback(connection.close)
    link = open_link(environment, secret, timeout_s)
    stack.callback(link.close)
    sockets = (connection, link.control)
    store, launcher = StoreClient(connection), LauncherNews(link.control)
    return _Parts(secret, store, link.recorder, link, launcher, sockets, stack.pop_all())
