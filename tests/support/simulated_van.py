"""A simulated network: many nodes, one thread, a virtual clock, and faults chosen by a seed.

Problem: protocols fail in orders of events that sockets on one machine never show: a reply that is
lost, a request that arrives twice or after its repetition, a node that is cut off in one direction.
Tests that sleep until such things happen are slow, and their failures cannot be reproduced.

Idea: the same state machines as over sockets, but frames travel through a heap of events. Nothing
waits: time jumps to the next event. All chance comes from one seed, so a run that failed is
repeated by its number.

    sender's VanState --next_frame--> [bandwidth] --whole message--> [faults, latency] -->
    receiver's VanState

Source: deterministic simulation as in FoundationDB (W. Wilson, Strange Loop 2014; J. Zhou et al.,
SIGMOD 2021).
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from braid.errors import CommError, CommTimeout, ConfigError, RendezvousError
from braid.runtime.clock import VirtualClock
from braid.runtime.message.guard import Guard
from braid.runtime.message.protocol.heads import Cancel, Head, Hello, More, Open, unpack
from braid.runtime.message.protocol.schema import Schema
from braid.runtime.message.protocol.send_queue import OutFrame
from braid.runtime.message.protocol.van_state import VanState
from braid.runtime.message.protocol.vocabulary import Delivery, VanConfig
from braid.runtime.message.van import Van
from braid.runtime.message.vans.local_van import hand_over
from support.message_faults import Faults

__all__ = ["Network", "SimulatedVan"]

_WINDOW = 64  # messages that a link holds before its sender must wait, like a kernel's buffers


Handler = Callable[["SimulatedVan", Delivery], None]


@dataclass(slots=True, eq=False)
class _Node:
    """One node of the network."""

    state: VanState
    van: SimulatedVan
    handler: Handler | None
    tick_ns: int | None = None  # time of the scheduled tick
    is_roused: bool = False  # whether its handler is scheduled
    postponed: list[Callable[[], None]] | None = None  # events of a stopped node


@dataclass(slots=True, eq=False)
class _Pipe:
    """One direction of a link."""

    source: _Node
    target: _Node
    there: int  # number of the link at the target; at the source it is the key
    under_way: int = 0  # messages between the two states
    is_busy: bool = False  # a frame is being transmitted
    parts: dict[int, list[OutFrame]] = field(default_factory=dict)  # by priority
    missing: dict[int, int] = field(default_factory=dict)  # bytes until the message is whole
    free_ns: dict[int, int] = field(
        default_factory=dict
    )  # arrival of the last message, by priority
    held: deque[list[OutFrame]] = field(default_factory=deque)  # the target does not read


class Network:
    """A network of nodes whose messages travel in virtual time.

    Args:
        schema: Message types of all nodes.
        seed: Seed of everything that is left to chance.
        faults: Faults that messages may suffer; `network.faults` may be replaced at any time.
        latency_s: Seconds from the last sent byte to the arrival.
        bytes_per_s: Bandwidth of each direction of each link; unlimited when None.
        config: Configuration of all vans, with times in virtual seconds.
        record: Whether to keep a line for every event in `trace`.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        seed: int = 0,
        faults: Faults | None = None,
        latency_s: float = 0.0005,
        bytes_per_s: float | None = None,
        config: VanConfig | None = None,
        record: bool = False,
    ) -> None:
        self.schema = schema
        self.faults = faults or Faults()
        self.config = config or VanConfig()
        self.clock = VirtualClock()
        self.counts: Counter[str] = Counter()
        self.trace: list[str] = []
        self._record = record
        self._random = random.Random(seed)
        self._latency_ns = round(latency_s * 1e9)
        self._bytes_per_s = bytes_per_s
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._links = itertools.count(1)
        self._incarnations = itertools.count(1)
        self._nodes: dict[str, _Node] = {}
        self._pipes: dict[int, _Pipe] = {}
        self._cuts: set[tuple[str, str]] = set()
        self._in_handler = ""

    # -- nodes

    def join(self, node: str, handler: Handler | None = None, *, epoch: int = 0) -> SimulatedVan:
        """Add `node` and return its van; also restarts a node that has crashed.

        Args:
            node: Name of the node.
            handler: Called as `handler(van, delivery)` for each delivery. It must not wait. When
                None, deliveries wait for `recv`, which lets time pass until one comes.
            epoch: Membership epoch to begin with.

        Raises:
            ConfigError: There is a node of that name, or it is no name.
        """
        if node in self._nodes:
            msg = f"there is already a node {node} in this network: crash() or close() it first"
            raise ConfigError(msg)
        incarnation = next(self._incarnations)
        state = VanState(node, self.schema, self.config, incarnation=incarnation, epoch=epoch)
        van = SimulatedVan(self, state)
        self._nodes[node] = _Node(state, van, handler)
        self._note("joins", node)
        return van

    def crash(self, node: str, *, silent: bool = False) -> None:
        """End a node at once, with all its unsent messages.

        Args:
            node: Name of the node.
            silent: True as when its host loses power: peers notice by its silence. False as when
                its process is killed: peers see the end of their links.
        """
        crashed = self._nodes.pop(node)
        self._note("crashes", node)
        crashed.van.crash(f"{node} has crashed")
        for link, pipe in list(self._pipes.items()):
            if pipe.source is crashed:
                self._sever(link, "its process ended", silent=silent)

    def stop(self, node: str) -> None:
        """Stop a node as SIGSTOP does: it neither computes nor reads, and its links stay."""
        self._nodes[node].postponed = []
        self._note("stops", node)

    def resume(self, node: str) -> None:
        """Let a stopped node go on, with what has come meanwhile."""
        stopped = self._nodes[node]
        postponed, stopped.postponed = stopped.postponed or [], None
        self._note("goes on", node)
        for do in postponed:
            do()

    def is_stopped(self, node: str) -> bool:
        """Whether a node is stopped."""
        return self._nodes[node].postponed is not None

    def partition(
        self, some: str | Iterable[str], others: str | Iterable[str], *, one_way: bool = False
    ) -> None:
        """Lose all messages from `some` to `others` from now on, and back unless `one_way`."""
        for a, b in itertools.product(_names(some), _names(others)):
            self._cuts |= {(a, b)} if one_way else {(a, b), (b, a)}
        self._note("partition", *sorted(f"{a}>{b}" for a, b in self._cuts))

    def heal(self) -> None:
        """End all partitions. Links that were lost stay so until a node connects again."""
        self._cuts.clear()
        self._note("heals")

    def link(self, node: str, to: str) -> None:
        """Connect two nodes; both begin the handshake at once.

        Raises:
            RendezvousError: There is no node `to`, or a partition lies between them.
        """
        here, there = self._nodes[node], self._nodes.get(to)
        if there is None or self._cuts & {(node, to), (to, node)}:
            msg = f"{node} cannot reach {to}: there is no such node, or a partition between them"
            raise RendezvousError(msg)
        ours, theirs = next(self._links), next(self._links)
        self._pipes[ours] = _Pipe(here, there, theirs)
        self._pipes[theirs] = _Pipe(there, here, ours)
        now_ns = self.clock.now_ns()
        here.state.link_up(ours, to, now_ns)
        there.state.link_up(theirs, node, now_ns)
        self.act(here.van)
        self.act(there.van)

    # -- time

    def call_later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Call `do` after `delay_s` virtual seconds."""
        self._at(self.clock.now_ns() + round(delay_s * 1e9), do)

    def step(self, until_ns: int | None = None) -> bool:
        """Process the next event; False, at `until_ns`, if there is none before."""
        if not self._events or (until_ns is not None and self._events[0][0] > until_ns):
            if until_ns is not None:
                self.clock.advance(max(0, until_ns - self.clock.now_ns()))
            return False
        at_ns, _, do = heapq.heappop(self._events)
        self.clock.advance(at_ns - self.clock.now_ns())
        do()
        return True

    def run_for(self, duration_s: float) -> None:
        """Let `seconds` of virtual time pass."""
        until_ns = self.clock.now_ns() + round(duration_s * 1e9)
        while self.step(until_ns):
            pass

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Let time pass until `condition()` holds.

        Raises:
            CommTimeout: The condition does not hold within `timeout_s` virtual seconds.
        """
        until_ns = self.clock.now_ns() + round(timeout_s * 1e9)
        while not condition():
            if not self.step(until_ns):
                msg = f"the condition does not hold within {timeout_s:g} virtual seconds"
                raise CommTimeout(msg)

    @property
    def is_handling(self) -> bool:
        """Whether a handler runs."""
        return bool(self._in_handler)

    # -- for the vans

    def act(self, van: SimulatedVan) -> None:
        """Execute the instructions of a node after an event; schedule its tick and its handler."""
        node = self._nodes.get(van.node)
        if node is None or node.van is not van:
            return
        van.act()
        due_ns = node.state.next_deadline_ns()
        if due_ns is not None and (node.tick_ns is None or due_ns < node.tick_ns):
            node.tick_ns = due_ns
            self._at(due_ns, lambda: self._tick(node, due_ns))
        if node.handler is not None and node.state.inbox.size and not node.is_roused:
            node.is_roused = True
            self._at(self.clock.now_ns(), lambda: self._handle(node))

    def wait(self, node: str, until_ns: int) -> bool:
        """Process one event on behalf of a van that waits.

        Raises:
            ConfigError: A handler waits, during which no event could be processed.
        """
        if self._in_handler and until_ns <= self.clock.now_ns():
            return False
        if self._in_handler:
            msg = (
                f"the handler of {self._in_handler} waits in a call of {node}: use try_send and "
                "answers to later messages"
            )
            raise ConfigError(msg)
        return self.step(until_ns)

    def carry(self, link: int) -> None:
        """Transmit frames of a link, as far as its window and its bandwidth allow."""
        pipe = self._pipes.get(link)
        while pipe is not None and not pipe.is_busy and pipe.under_way < _WINDOW:
            now_ns = self.clock.now_ns()
            frame = pipe.source.state.next_frame(link, now_ns)
            if frame is None:
                return
            # The sender may reuse its memory as soon as the frame is sent.
            frame = OutFrame(frame.meta, [memoryview(bytes(piece)) for piece in frame.pieces])
            head = unpack(frame.meta, pipe.source.van.node)
            if self._bytes_per_s is None or isinstance(head, Hello):  # connecting takes no time
                pipe.source.state.frame_sent(link, now_ns)
                self._gather(link, pipe, head, frame)
            else:
                pipe.is_busy = True
                nbytes = len(frame.meta) + sum(map(len, frame.pieces))
                sent_ns = now_ns + round(nbytes / self._bytes_per_s * 1e9)
                self._at(sent_ns, self._transmitted(link, pipe, head, frame))

    def read_again(self, link: int) -> None:
        """Resume reading at this end of `link`, whose node has room again."""
        pipe = self._pipes.get(link)
        back = None if pipe is None else self._pipes.get(pipe.there)
        while back is not None and back.held and back.target.state.wants_read(link):
            self._deliver(back, back.held.popleft())

    def cut(self, link: int) -> None:
        """End `link` from this end; the other end learns it unless a partition lies between."""
        if link in self._pipes:
            self._sever(link, "it closed the connection", silent=False)

    def unregister(self, node: str) -> None:
        """Remove a node whose van is closed."""
        self._nodes.pop(node, None)
        self._note("leaves", node)

    # -- inside

    def _at(self, at_ns: int, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ns, next(self._numbers), do))

    def _note(self, what: str, *details: object) -> None:
        self.counts[what] += 1
        if self._record:
            self.trace.append(" ".join(map(str, (self.clock.now_ns(), what, *details))))

    def _tick(self, node: _Node, due_ns: int) -> None:
        if node.postponed is not None:
            node.postponed.append(lambda: self._tick(node, due_ns))
        elif node.tick_ns == due_ns:
            node.tick_ns = None
            node.state.tick(self.clock.now_ns())
            self.act(node.van)

    def _handle(self, node: _Node) -> None:
        if node.postponed is not None:
            node.postponed.append(lambda: self._handle(node))
            return
        node.is_roused = False
        self._in_handler = node.van.node
        try:
            while node.handler is not None and node.van.is_open:
                delivery = node.van.try_recv()
                if delivery is None:
                    return
                node.handler(node.van, delivery)
        finally:
            self._in_handler = ""

    def _transmitted(
        self, link: int, pipe: _Pipe, head: Head, frame: OutFrame
    ) -> Callable[[], None]:
        def do() -> None:
            pipe.is_busy = False
            pipe.source.state.frame_sent(link, self.clock.now_ns())
            self._gather(link, pipe, head, frame)
            self.carry(link)
            self.act(pipe.source.van)

        return do

    def _gather(self, link: int, pipe: _Pipe, head: Head, frame: OutFrame) -> None:
        """Collect frames until a message is complete: it arrives, or is lost, as a whole."""
        if link not in self._pipes:
            return
        if isinstance(head, Hello):
            self._receive(pipe, [frame])
        elif isinstance(head, Cancel):
            pipe.parts.pop(head.priority, None)  # its beginning was lost
        elif isinstance(head, Open | More):
            priority = head.priority
            if isinstance(head, Open):
                pipe.parts[priority] = []
                pipe.missing[priority] = head.nbytes - len(head.body) - len(head.tail)
            pipe.parts[priority].append(frame)
            pipe.missing[priority] -= sum(map(len, frame.pieces))
            if not pipe.missing[priority]:
                self._send(pipe, pipe.parts.pop(priority), priority)
        else:
            self._send(pipe, [frame], None)

    def _send(self, pipe: _Pipe, message: list[OutFrame], priority: int | None) -> None:
        """Choose the fate of a message; a control head, of priority None, waits for all others."""
        ends = pipe.source.van.node, pipe.target.van.node
        copies = [] if ends in self._cuts else self.faults.strike(self._random)
        if not copies:
            self._note("drops", *ends)
        if len(copies) > 1:
            self._note("duplicates", *ends)
        for late_ns, in_order in copies:
            at_ns = self.clock.now_ns() + self._latency_ns + late_ns
            if late_ns:
                self._note("delays" if in_order else "reorders", *ends)
            if in_order:
                before = (
                    pipe.free_ns.values() if priority is None else [pipe.free_ns.get(priority, 0)]
                )
                at_ns = max(at_ns, *before, 0)
                pipe.free_ns[-1 if priority is None else priority] = at_ns
            pipe.under_way += 1
            self._at(at_ns, lambda: self._arrive(pipe, message))

    def _arrive(self, pipe: _Pipe, message: list[OutFrame]) -> None:
        if pipe.target.postponed is not None:
            pipe.target.postponed.append(lambda: self._arrive(pipe, message))
        elif pipe.held or not pipe.target.state.wants_read(pipe.there):
            pipe.held.append(message)
        else:
            self._deliver(pipe, message)

    def _deliver(self, pipe: _Pipe, message: list[OutFrame]) -> None:
        pipe.under_way -= 1
        self._receive(pipe, message)
        back = self._pipes.get(pipe.there)
        if back is not None:
            self.carry(back.there)

    def _receive(self, pipe: _Pipe, message: list[OutFrame]) -> None:
        target = pipe.target
        if pipe.there not in self._pipes or self._nodes.get(target.van.node) is not target:
            self._refuse(pipe)
            return
        self._note("arrives", pipe.source.van.node, target.van.node, len(message))
        now_ns = self.clock.now_ns()
        try:
            for frame in message:
                hand_over(frame, target.state, pipe.there, now_ns)
        except CommError as exc:
            target.state.link_lost(pipe.there, f"it broke the protocol: {exc}")
        self.act(target.van)

    def _refuse(self, pipe: _Pipe) -> None:
        """Answer on a link that the target has ended as a kernel does, if the target still runs."""
        ends = pipe.target.van.node, pipe.source.van.node
        back = next((link for link, other in self._pipes.items() if other is pipe), None)
        if back is None or ends in self._cuts or ends[0] not in self._nodes:
            return

        def do() -> None:
            if pipe.source.postponed is not None:
                pipe.source.postponed.append(do)
            elif self._pipes.pop(back, None) is not None:
                pipe.source.state.link_lost(back, "it closed the connection")
                self.act(pipe.source.van)

        self._at(self.clock.now_ns() + self._latency_ns, do)

    def _sever(self, link: int, reason: str, *, silent: bool) -> None:
        """Remove this end of a link, and notify the other end after the messages under way.

        A silent end, and one behind a partition, sends no notice.
        """
        pipe = self._pipes.pop(link)
        ends = pipe.source.van.node, pipe.target.van.node
        if silent or ends in self._cuts:
            return

        def do() -> None:
            if pipe.target.postponed is not None:
                pipe.target.postponed.append(do)
                return
            self._pipes.pop(pipe.there, None)
            pipe.target.state.link_lost(pipe.there, reason)
            self.act(pipe.target.van)

        at_ns = self.clock.now_ns() + self._latency_ns
        self._at(max([at_ns, *pipe.free_ns.values()]), do)


class SimulatedVan(Van):
    """A `Van` of a simulated `Network`, made by `Network.join`; all vans share one thread."""

    def __init__(self, network: Network, state: VanState) -> None:
        super().__init__(state, network.schema, network.clock, Guard())
        self._network = network

    @property
    def is_open(self) -> bool:
        """Whether the van is neither closed nor crashed."""
        return not self._ended

    @property
    def address(self) -> str:
        """Name of the node, by which others connect."""
        return self.node

    def connect(self, to: str, address: str = "", *, timeout_s: float | None = None) -> None:  # noqa: ARG002
        """See `Van.connect`; succeeds or fails at once, so that handlers may connect."""
        self._check_open()
        if not self._state.is_connected(to):
            self._network.link(self.node, to)

    def close(self, linger_s: float = 1.0) -> None:
        """See `Van.close`; a handler that closes does not linger."""
        super().close(0.0 if self._network.is_handling else linger_s)

    def crash(self, reason: str) -> None:
        """End this node at once; called by the network."""
        self._ended, self._is_closed = reason, True
        self._state.close()
        self._state.instructions.clear()

    def act(self) -> None:
        """Execute the instructions of the state; called by the network."""
        with self._guard:
            super()._act()

    def _act(self) -> None:
        self._network.act(self)

    def _carry(self, link: int) -> None:
        self._network.carry(link)

    def _cut(self, link: int) -> None:
        self._network.cut(link)

    def _read_again(self, link: int) -> None:
        self._network.read_again(link)

    def _wait(self, deadline_ns: int) -> bool:
        return self._network.wait(self.node, deadline_ns)

    def _release(self) -> None:
        self._network.unregister(self.node)


def _names(nodes: str | Iterable[str]) -> list[str]:
    return [nodes] if isinstance(nodes, str) else list(nodes)
