"""`KVNode`: the scheduler, a server or a worker of key-value programs; `join` makes it.

    with kv.join(braid.init(), servers=2) as node:      # rank 0 schedules, ranks 1 and 2 serve
        if node.is_server:
            server = kv.KVServer(node)
            server.set_request_handle(kv.KVServerDefaultHandle())
        elif node.is_worker:
            worker = kv.KVWorker(node)
            worker.wait(worker.push([1, 2], torch.ones(2)))

At the end of the block each node waits for all others.

    van ──> Postoffice ──> KVRequest: the app with its number   ──> its handle
                     └───> answers: the Customer of the request ──> callback, wait
                     └───> Here: the directory of live and lost nodes

One thread of the node receives messages and runs handles, so that servers serve and callbacks run
independently of the program. Waiting threads also receive when that thread is busy.

Source: PS-Lite's Postoffice.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from braid.comm import Group
from braid.errors import BraidError, CommError, CommTimeout, ConfigError, StaleError
from braid.ps.base_node import BaseNode
from braid.ps.kv.app import App
from braid.ps.kv.control import CONTROL_APP, Control, KVScheduler
from braid.ps.kv.groups import ALL, id_of, key_ranges, members_of
from braid.ps.kv.messages import (
    SCHEMA,
    Depart,
    Enter,
    KVRequest,
    Note,
    Transfer,
    Transferred,
)
from braid.ps.kv.protocol.executed import Executed
from braid.ps.messages import RequestRefused
from braid.ps.postoffice import Postoffice
from braid.ps.protocol.directory import SCHEDULER, Directory, Role
from braid.ps.rendezvous import VAN, assign_place, make_van
from braid.runtime.message import Delivery, Message, Van
from braid.runtime.rendezvous import JobEnvironment, wants_portable
from braid.runtime.wire import Buffer

__all__ = ["KVNode", "join"]

FAREWELL_S = 10.0  # time that the scheduler waits for all links to close


class KVNode(BaseNode):
    """A process of a key-value run: scheduler, server or worker, with the apps of the process.

    Args:
        van: Connections of the node to other nodes; owned and closed by this object.
        role: Role of the node.
        number: Number of this server, or of this worker.
        counts: Number of servers and of workers.
        scheduler: Address of the scheduler; empty for itself.
        resend_s: Seconds after which unanswered messages are sent again, on links that lose some.
        unknown_s: Seconds for which a request waits for an app that does not exist yet.

    Attributes:
        executed: Requests received from other nodes, so that each is executed once.
        lost: Reason of the loss of each lost node.
    """

    def __init__(
        self,
        van: Van,
        role: Role,
        number: int,
        counts: tuple[int, int],
        scheduler: str = "",
        *,
        resend_s: float | None = None,
        unknown_s: float = 5.0,
    ) -> None:
        postoffice = Postoffice(van, "" if role == SCHEDULER else scheduler, resend_s=resend_s)
        super().__init__(postoffice, role, number, counts)
        self.executed: Executed[tuple[Message, Sequence[Buffer]]] = Executed()
        self.lost: dict[str, str] = {}
        self._lost_ns: dict[str, int] = {}
        self._unknown_ns = round(unknown_s * 1e9)
        self._apps: dict[tuple[int, int], App] = {}
        self._parked: list[tuple[int, Delivery]] = []
        self._is_closing = self._is_closed = False
        self._in_handle = threading.local()
        self._thread: threading.Thread | None = None
        self.postoffice.register(
            dict.fromkeys((Note, Transfer, Enter, Depart), self._receive),
            on_directory=self._note_lost,
            on_lost=self._lose,
            waiting=self.executed.waiting,
        )
        self._control = KVScheduler(self) if role == SCHEDULER else Control(self)
        self.postoffice.receive_into(Transferred)

    # -- numbers of nodes

    @property
    def id(self) -> int:
        """Number of this node: scheduler 1, servers 8, 10, ..., workers 9, 11, ..."""
        return id_of(self.name)

    def ids(self, group: int) -> list[int]:
        """Return the numbers of the nodes of a group."""
        return [id_of(node) for node in members_of(group, self.num_servers, self.num_workers)]

    def server_key_ranges(self) -> list[tuple[int, int]]:
        """Return the range of keys of each server: (first key, last key + 1)."""
        return key_ranges(self.num_servers)

    def dead_nodes(self, since_s: float = 0.0) -> list[int]:
        """Return the numbers of nodes that have been lost for at least `since_s` seconds."""
        before_ns = self.postoffice.van.clock.now_ns() - round(since_s * 1e9)
        return sorted(id_of(node) for node, at in self._lost_ns.items() if at <= before_ns)

    def losses(self) -> str:
        """Return the lost nodes with their reasons as text."""
        return "; ".join(f"{node} is lost: {reason}" for node, reason in sorted(self.lost.items()))

    # -- life

    def begin(self) -> None:
        """Connect to the scheduler and join, without waiting for others."""
        if not self.is_scheduler:
            self.postoffice.begin()

    def start(self, timeout_s: float | None = None) -> None:
        """Join, start the node's thread, and wait until all nodes have joined.

        Raises:
            CommTimeout: Some nodes have not joined; the scheduler's error names them.
            PeerLostError: The scheduler has refused this node, or is lost.
            RendezvousError: The scheduler cannot be reached.
        """
        self.begin()
        self._thread = threading.Thread(
            target=self._serve, name=f"braid-ps-{self.name}", daemon=True
        )
        self._thread.start()
        self.postoffice.wait_until(
            lambda: self.is_member or bool(self.postoffice.failure), timeout_s, self._absent
        )
        self.postoffice.raise_failure()

    @property
    def is_member(self) -> bool:
        """Whether the node is a member: it has the list of members, so all nodes have joined."""
        return self.postoffice.directory is not None

    @property
    def is_over(self) -> bool:
        """Whether all other nodes have finished or are lost; False except on the scheduler."""
        return isinstance(self._control, KVScheduler) and self._control.state.is_over

    def barrier(self, group: int = ALL, number: int = 0, timeout_s: float | None = None) -> None:
        """Wait until all nodes of a group have entered the barrier.

        Args:
            group: Sum of groups, which contains this node.
            number: Number of the barrier; barriers with different numbers are independent.
            timeout_s: Deadline in seconds; 300 s when None.

        Raises:
            CommError: A member is lost or has left, or this node is not a member of the group.
            CommTimeout: Some nodes have not entered the barrier.
        """
        if not isinstance(self._control, KVScheduler):
            self._control.wait(self._control.enter(group, number), timeout_s)
            return
        state = self._control.state
        opened: list[str] = []
        self._control.enter_here(group, number, opened.append)
        self.postoffice.wait_until(
            lambda: bool(opened), timeout_s, lambda: "; ".join(state.waiting())
        )
        if opened[0]:
            raise CommError(opened[0])

    def close(self, timeout_s: float | None = None, *, with_barrier: bool = True) -> None:
        """Wait for all requests of this node and for all nodes, then leave. Idempotent.

        Raises:
            CommError: A request has failed, or a node is lost.
            CommTimeout: Some nodes did not enter the final barrier.
        """
        if self._is_closed:
            return
        try:
            for app in list(self._apps.values()):
                if app is not self._control:
                    app.wait_all(timeout_s)
            if with_barrier:
                self.barrier(ALL, timeout_s=timeout_s)
        finally:
            self._is_closing = True
            with contextlib.suppress(BraidError):
                self._depart(timeout_s)
            self.abort()

    def wait_for_customer(self, customer_id: int, timeout_s: float | None = None) -> None:
        """Wait for all requests of the apps with this `customer_id`; see `App.wait`."""
        for app in list(self._apps.values()):
            if app.customer_id == customer_id and app is not self._control:
                app.wait_all(timeout_s)

    def abort(self, reason: str = "") -> None:
        """Leave immediately; other nodes see a loss without the reason. Idempotent."""
        del reason
        self._is_closed = self._is_closing = True
        self.postoffice.close(0.5)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _depart(self, timeout_s: float | None) -> None:
        if not isinstance(self._control, KVScheduler):
            self._control.wait(self._control.depart(), timeout_s)
            return
        state, van = self._control.state, self.postoffice.van
        self.postoffice.wait_until(lambda: state.is_over, timeout_s)
        self.postoffice.wait_until(lambda: not van.peers, FAREWELL_S)

    # -- for apps

    def register(self, app: App) -> None:
        """Register an app, which then receives the requests with its number.

        Raises:
            ConfigError: Another app has the number, or a number is negative.
        """
        place = self._place(app.app_id, app.customer_id)
        is_control = app.app_id == CONTROL_APP and not self._apps
        if not is_control and (app.app_id < 0 or app.customer_id < 0):
            msg = (
                f"app_id and customer_id must be at least 0, got {app.app_id} and {app.customer_id}"
            )
            raise ConfigError(msg)
        if place in self._apps:
            customer = f" with customer {app.customer_id}" if self.is_worker else ""
            msg = (
                f"{self.name} already has an app {app.app_id}{customer}: choose another app_id "
                "or customer_id"
            )
            raise ConfigError(msg)
        with self.postoffice.lock:
            self._apps[place] = app
        self.dispatch_parked()

    def dispatch_parked(self) -> None:
        """Dispatch waiting requests again; apps call this when they get a request handle."""
        with self.postoffice.lock:
            parked, self._parked = self._parked, []
            for due_ns, delivery in parked:
                self._dispatch(delivery, due_ns)

    @contextlib.contextmanager
    def in_handle(self) -> Iterator[None]:
        """Mark that this thread runs a request handle or callback of the program in the block."""
        depth = getattr(self._in_handle, "depth", 0)
        self._in_handle.depth = depth + 1
        try:
            yield
        finally:
            self._in_handle.depth = depth

    @property
    def is_in_handle(self) -> bool:
        """Whether this thread runs a request handle or a callback of the program."""
        return getattr(self._in_handle, "depth", 0) > 0

    # -- events, with the lock held

    def _place(self, app: int, customer: int) -> tuple[int, int]:
        return app, customer if self.is_worker else 0

    def _receive(self, delivery: Delivery) -> None:
        self._dispatch(delivery, self.postoffice.van.clock.now_ns() + self._unknown_ns)

    def _dispatch(self, delivery: Delivery, due_ns: int) -> None:
        message = delivery.message
        assert isinstance(message, KVRequest), "this handler is for requests"
        app = self._apps.get(self._place(message.app, message.customer))
        if app is None or not app.is_ready_for(message):
            self._parked.append((due_ns, delivery))
        else:
            app.receive(delivery)

    def _is_overdue(self) -> bool:
        now_ns = self.postoffice.van.clock.now_ns()
        return any(due_ns <= now_ns for due_ns, _ in self._parked)

    def refuse_overdue(self) -> None:
        """Refuse waiting requests for apps or request handles that were not set in time."""
        with self.postoffice.lock:
            now_ns = self.postoffice.van.clock.now_ns()
            late = [delivery for due_ns, delivery in self._parked if due_ns <= now_ns]
            self._parked = [parked for parked in self._parked if parked[0] > now_ns]
            known = sorted(place for place in self._apps if place[0] != CONTROL_APP)
            for delivery in late:
                message = delivery.message
                assert isinstance(message, KVRequest), "only requests are parked"
                customer = f" for customer {message.customer}" if self.is_worker else ""
                apps = ", ".join(str(place if self.is_worker else place[0]) for place in known)
                text = (
                    f"{self.name} has no app {message.app}{customer}, only {apps or 'none'}: "
                    "make the app on all nodes"
                )
                if self._place(message.app, message.customer) in self._apps:
                    text = (
                        f"app {message.app} of {self.name} has no function that handles pushes "
                        "and pulls: call set_request_handle"
                    )
                self.postoffice.send(delivery.sender, RequestRefused(text), answers=delivery.id)

    def _note_lost(self, directory: Directory) -> None:
        """Record the lost nodes of a directory; requests to them fail."""
        now_ns = self.postoffice.van.clock.now_ns()
        self.lost = directory.lost_nodes
        self._lost_ns = {node: self._lost_ns.get(node, now_ns) for node in self.lost}
        for node in self.lost:
            self.postoffice.links.drop(node)

    def _lose(self, node: str) -> None:
        """Handle a broken link: only a worker reconnects, and only to servers."""
        loss = self.postoffice.links.losses[node]
        if not self.is_worker or loss.orderly or not node.startswith("server"):
            self.postoffice.links.drop(node)
        if node == SCHEDULER and not self._is_closing:
            self.postoffice.failure = f"lost the scheduler: {loss.reason}"

    def _absent(self) -> str:
        if isinstance(self._control, KVScheduler):
            return (
                f"{', '.join(self._control.state.absent)} did not join: look for errors of these "
                "processes"
            )
        return (
            "not all servers and workers have joined the scheduler: look for errors of the "
            "missing processes"
        )

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                self.postoffice.wait_until(lambda: self._is_closed or self._is_overdue(), math.inf)
            except CommTimeout:  # of a send in a handler
                continue
            except StaleError:  # the van is closed
                return
            self.refuse_overdue()

    def __repr__(self) -> str:
        return f"<KVNode {self.name}, {len(self._apps) - 1} apps, {len(self.lost)} lost>"


def join(
    group: Group,
    servers: int,
    *,
    address: str = "",
    shared_memory: bool = True,
    resend_s: float | None = None,
    drop: float = 0.0,
    unknown_s: float = 5.0,
    timeout_s: float | None = None,
) -> KVNode:
    """Join the ranks of a group as scheduler, servers and workers; a collective.

    Args:
        group: All ranks: the scheduler, then the servers, then the workers.
        servers: Number of servers.
        address: Address on which nodes listen; one that all ranks can reach when empty.
        shared_memory: Whether large tensors between processes of one host are sent through shared
            memory; `BRAID_PORTABLE` disables it.
        resend_s: Seconds after which unanswered messages are sent again, on links that lose some.
        drop: Fraction of arriving messages that each node drops, for tests.
        unknown_s: Seconds for which a request waits for an app that does not exist yet.
        timeout_s: Deadline for all nodes to join, in seconds.

    Raises:
        ConfigError: The group has no server or no worker.
        CommTimeout: Some nodes have not joined.
    """
    if JobEnvironment.from_os().replaces >= 0:
        msg = (
            "a node of keys and values cannot replace a lost one: use tables (braid.ps), or start "
            "the run without --restarts"
        )
        raise ConfigError(msg)
    place = assign_place(group, servers, address=address)
    config = replace(VAN, shared_memory=shared_memory and not wants_portable())
    van = make_van(place, SCHEMA, config, drop=drop)
    scheduler = group.objects.broadcast(van.address)
    node = KVNode(
        van,
        place.role,
        place.number,
        (servers, group.size - 1 - servers),
        scheduler,
        resend_s=resend_s,
        unknown_s=unknown_s,
    )
    try:
        node.start(timeout_s)
    except BaseException:
        node.abort()
        raise
    return node
