"""Becoming a rank: from what the launcher said to everything that a rank has.

    environment -> store, black box, control socket -> shared memory of all ranks -> RankContext

Three ways of being started end in the same place. Under `braid run` the launcher serves the store
and hears of failures; under torchrun (or anything that keeps its contract) torch's store is
wrapped; alone, a process is a world of one rank that runs through the same lines.

A membership also decides how its process is remembered. A rank that closes it has *left*, and only
who still needs it is hurt; a rank that ends by an exception has *failed*: the exception travels to
the launcher before the interpreter is torn down. Forked children (of a DataLoader, say) lose the
descriptors, so they can neither speak for their parent nor keep its sockets open.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import faulthandler
import mmap
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from types import TracebackType
from typing import NamedTuple

from torch import distributed as dist

from braid.clock import Clock, MonotonicClock
from braid.diagnose import parse_error
from braid.errors import RendezvousError
from braid.events import EventRing, Recorder
from braid.rendezvous.control import ControlClient, Failed, Hello, Left, RankLost, Stop
from braid.rendezvous.environment import JobEnvironment
from braid.rendezvous.network import network_of
from braid.store import STORE_LIMITS, STORE_ROLE, HashStore, PrefixStore, Store, StoreClient
from braid.store.torch_store import TorchStore
from braid.transport import Health, Loss, MemoryTransport, RankContext, connect
from braid.wire import Connection, Identity, Secret
from braid.wire import connect as dial

__all__ = ["Membership", "join"]

PRIVATE_RECORDS = 4096  # events that are kept when no launcher reads them


class _Parts(NamedTuple):
    """What the launcher gives a rank."""

    secret: Secret | None
    store: Store
    recorder: Recorder
    control: ControlClient | None
    launcher: _Launcher | None
    sockets: tuple[Connection | ControlClient, ...]
    closers: contextlib.ExitStack


class _Launcher:
    """The launcher as a witness of losses; also remembers that it asked to stop."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self.stop_reason = ""

    def fileno(self) -> int:
        return self._control.fileno()

    def losses(self) -> list[Loss]:
        losses = []
        for message in self._control.poll():
            if isinstance(message, RankLost):
                losses.append(Loss(message.rank, message.reason, message.left))
            elif isinstance(message, Stop):
                self.stop_reason = message.reason
        return losses


class Membership:
    """This process as a rank of its job; a context manager.

    Attributes:
        environment: What the launcher said.
        context: Handed to everything that communicates.
        transport: Shared memory of the job.
        control: Connection to braid's launcher; None without it.
        failed: Whether an exception is ending this process.
        failure: That exception, as `type: message`.
    """

    def __init__(
        self,
        environment: JobEnvironment,
        context: RankContext,
        transport: MemoryTransport,
        parts: _Parts,
    ) -> None:
        self.environment = environment
        self.context = context
        self.transport = transport
        self.control = parts.control
        self._launcher = parts.launcher
        self._sockets = parts.sockets
        self._closers = parts.closers
        self.failed = False
        self.failure = ""
        self._closed = False
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self.close)
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(reference))

    @property
    def stop_reason(self) -> str:
        """Why the launcher wants this rank to save and end; empty while it does not."""
        if self._launcher is None:
            return ""
        self.context.health.collect()
        return self._launcher.stop_reason

    def close(self) -> None:
        """Leave the job and give everything back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        atexit.unregister(self.close)
        if not self.failed and not self.transport.forked:
            self.transport.leave()
            if self.control is not None:
                self.control.send(Left())
        self.transport.close()
        self._closers.close()

    def fds(self) -> list[int]:
        """Descriptors that a forked child must not keep."""
        sockets = [socket.fileno() for socket in self._sockets]
        return self.transport.fds() + [fd for fd in sockets if fd >= 0]

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
        self.failed = True
        self.failure = f"{kind.__name__}: {value}"
        if self.control is not None and not self.transport.forked:
            text = "".join(traceback.format_exception(kind, value, trace))
            parsed = parse_error(text)
            where = parsed.where if parsed else ""
            self.control.send(Failed(kind.__name__, str(value), where, text))
        self._hook(kind, value, trace)


def join(
    environment: JobEnvironment, *, clock: Clock | None = None, timeout_s: float = 600.0
) -> Membership:
    """Become a rank of the job that `environment` describes.

    Args:
        environment: What the launcher said.
        clock: Time source for everything; the host's when None.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        RendezvousError: The launcher or some ranks did not come, or this rank is there already.
        ConfigError: Only some ranks are to be portable, or ranks of several hosts have no secret in
            common.
    """
    clock = clock or MonotonicClock()
    parts = _parts(environment, timeout_s)
    with contextlib.ExitStack() as undo:
        undo.callback(parts.closers.close)
        store = _own_prefix(environment, parts.store)
        health = Health(environment.rank, clock)
        if parts.launcher is not None:
            health.register(parts.launcher)
        context = RankContext(
            environment.rank,
            environment.world_size,
            clock,
            parts.recorder,
            health,
            store,
        )
        secret, network = network_of(environment, parts.secret)
        transport = connect(
            environment.rank,
            environment.world_size,
            store,
            clock,
            health,
            timeout_s=timeout_s,
            portable=environment.portable,
            secret=secret,
            network=network,
        )
        if parts.control is not None:
            parts.control.send(Hello(os.getpid()))
        undo.pop_all()
    return Membership(environment, context, transport, parts)


def _parts(environment: JobEnvironment, timeout_s: float) -> _Parts:
    with contextlib.ExitStack() as stack:
        if environment.launched_by == "braid":
            return _from_launcher(environment, timeout_s, stack)
        store = (
            _torch_store(environment, timeout_s)
            if environment.launched_by == "torchrun" and environment.world_size > 1
            else HashStore()
        )
        private = bytearray(EventRing.nbytes_for(PRIVATE_RECORDS))
        ring = EventRing(private, PRIVATE_RECORDS, names_lock=threading.Lock())
        return _Parts(None, store, Recorder(ring), None, None, (), stack.pop_all())


def _from_launcher(
    environment: JobEnvironment, timeout_s: float, stack: contextlib.ExitStack
) -> _Parts:
    fds = (environment.secret_fd, environment.events_fd, environment.stacks_fd)
    secret_fd, events_fd, stacks_fd = (-1 if fd is None else fd for fd in fds)
    secret = Secret.from_fd(os.dup(secret_fd))  # the launcher's own stays, for a later `join`
    who = Identity(environment.run_id, STORE_ROLE, environment.rank)
    connection = dial(
        environment.store_address, secret, who, timeout_s=timeout_s, limits=STORE_LIMITS
    )
    stack.callback(connection.close)
    control = ControlClient.dial(environment.store_address, secret, who, timeout_s=timeout_s)
    stack.callback(control.close)
    memory = mmap.mmap(events_fd, os.fstat(events_fd).st_size)
    ring = EventRing(memory, names_lock=threading.Lock())
    ring.pid = os.getpid()
    faulthandler.register(signal.SIGUSR1, file=stacks_fd, all_threads=True)
    stack.callback(faulthandler.unregister, signal.SIGUSR1)
    sockets = (connection, control)
    store, launcher = StoreClient(connection), _Launcher(control)
    return _Parts(secret, store, Recorder(ring), control, launcher, sockets, stack.pop_all())


def _torch_store(environment: JobEnvironment, timeout_s: float) -> Store:
    """Torch's own store: the launcher's if it serves one, else rank 0's, on the given address only."""
    timeout = dt.timedelta(seconds=timeout_s)
    host, port = environment.master_addr, environment.master_port
    serves = environment.rank == 0 and not environment.agent_store
    listen_fd = None
    try:
        if serves:  # by itself torch would listen on every interface
            listener = socket.create_server((host, port), backlog=1024)
            listen_fd = listener.detach()
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not list it for checkers
            host,
            port,
            environment.world_size,
            serves,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listen_fd,
        )
    except (OSError, RuntimeError) as exc:
        role = "serve" if serves else "reach"
        msg = (
            f"expected to {role} the store at MASTER_ADDR:MASTER_PORT {host}:{port} as rank "
            f"{environment.rank}, found: "
            f"{str(exc).splitlines()[0]}: choose another MASTER_PORT, or see whether rank 0 is up"
        )
        raise RendezvousError(msg) from exc
    return PrefixStore("braid/", TorchStore(store, timeout_s))


def _own_prefix(environment: JobEnvironment, store: Store) -> Store:
    """Keys of this joining: a process may leave and join again, two processes may not be one rank."""
    rank, me = environment.rank, f"{socket.gethostname()}:{os.getpid()}".encode()
    owner = store.compare_set(f"owner/{rank}", b"", me)
    if owner != me:
        msg = (
            f"expected one process with rank {rank}, found {owner.decode()} and {me.decode()}: "
            "give every process its "
            "own RANK, or use a fresh rendezvous address for a new job"
        )
        raise RendezvousError(msg)
    return PrefixStore(f"join-{store.add(f'joins/{rank}', 1)}/", store)


def _forget(reference: weakref.ref[Membership]) -> None:
    """In a forked child: point every descriptor of the parent's membership at nothing."""
    membership = reference()
    if membership is None:
        return
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in membership.fds():
        with contextlib.suppress(OSError):
            os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)
