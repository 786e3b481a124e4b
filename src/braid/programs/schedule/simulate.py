"""Simulator: the time of a program on a network, without running it.

Every rank goes through its list; actions that it posts together are under way at the same time.
Messages of one round from one rank to another travel as one. A message begins when both ends have
been posted (rendezvous) or when its send has (buffered), and waits for the latency of its route.
Then it moves at the rate of its slowest link, which it shares evenly with the messages on that link
at that time. So no assumption is needed about who waits for whom, and a link that is oversubscribed
slows exactly its users.

    rank 0   |post| latency |======= bytes at the rate of the slowest link =======| add |post| ...
    rank 1        |post ....|=====================================================| add |post| ...

Rates follow from even sharing of each link (a share that one message does not use goes to no other
message), which is close to TCP flows of equal latency. A link may have a token bucket, as clouds
limit their networks: after a rest it carries a burst above its rate. When the burst is used up, it
has its rate until it rests again.


Source: the fluid model of network simulators; H. Casanova et al., SimGrid, JPDC 74 (2014).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from braid.errors import ConfigError
from braid.programs.schedule.matching import Message, match, messages
from braid.programs.schedule.program import SEND, Action, Program, batches

__all__ = ["Costs", "Interval", "Route", "Timeline", "simulate"]

BOTH = 2  # ends of a message
OPEN = 1e3  # factor on the rate of a link while its bucket has tokens
SAME_TIME = 1e-12  # relative difference of simultaneous events: sums of floats depend on order

LITTLE = 1e-9  # share of a bucket that counts as empty


class Route(NamedTuple):
    """Route from one rank to another.

    Attributes:
        latency_s: Seconds until the first byte arrives.
        links: Numbers of the links on the route.
        bytes_per_s: Largest rate of one message of this size, even if the links are idle.
    """

    latency_s: float
    links: tuple[int, ...]
    bytes_per_s: float = float("inf")


class NetworkModel(Protocol):
    """Network model of a simulation: latency and bandwidth between ranks."""

    @property
    def bytes_per_s(self) -> Iterable[float]:
        """Bandwidth of every link."""

    @property
    def burst_bytes(self) -> Iterable[float]:
        """Bytes that each link can carry above its rate after an idle time (token bucket)."""

    def route(self, source: int, target: int, nbytes: float) -> Route:
        """Return the route of a message of `nbytes` from a rank to another one."""


class Costs(NamedTuple):
    """Costs of actions for a simulation: bytes of messages, and seconds of work.

    Attributes:
        nbytes: Function that returns the bytes of a message, given its send or receive.
        seconds: Function that returns the seconds of an action's work on its rank. For a receive,
            this is the work after its data has arrived.
    """

    nbytes: Callable[[int, Action], float]
    seconds: Callable[[int, Action], float]


class Interval(NamedTuple):
    """Time span of one piece of work, or one message, of a rank.

    Attributes:
        rank: Rank.
        start_s: Seconds from the start of the program to the begin of the span.
        end_s: Seconds from the start of the program to the end of the span.
        action: First of the actions that ran together in this span.
        num_actions: Number of these actions.
        is_message: Whether it is a message, rather than work.
    """

    rank: int
    start_s: float
    end_s: float
    action: Action
    num_actions: int = 1
    is_message: bool = False


class Timeline(NamedTuple):
    """Result of a simulation.

    Attributes:
        intervals: Intervals of all ranks, by start.
        end_s: Time at which each rank finished.
        link_bytes: Number of bytes that each link carried.
    """

    intervals: list[Interval]
    end_s: list[float]
    link_bytes: dict[int, float]

    @property
    def seconds(self) -> float:
        """Time at which the last rank finished."""
        return max(self.end_s, default=0.0)


def simulate(
    program: Program, costs: Costs, network: NetworkModel, *, buffered: bool = False
) -> Timeline:
    """Execute `program` in simulated time.

    Args:
        program: Valid program.
        costs: Bytes and seconds of its actions.
        network: Network that messages travel over.
        buffered: Whether a message can be sent before its receive is posted.

    Raises:
        ConfigError: The program cannot complete, because a send or receive has no partner or the
            program deadlocks. Or a cost is negative or not finite.
    """
    return _Simulation(program, costs, network, buffered=buffered).run()


class _SimulatedMessage:
    """Sends of one rank in one round that another rank receives in one round."""

    __slots__ = (
        "actions",
        "has_arrived",
        "left",
        "links",
        "max_rate",
        "nbytes",
        "posted",
        "ranks",
        "rate",
        "start_s",
    )

    def __init__(self, message: Message, nbytes: float) -> None:
        self.ranks = (message.source, message.target)
        self.actions = (message.sends, message.receives)
        self.links: tuple[int, ...] = ()
        self.nbytes = nbytes
        self.left = self.rate = self.max_rate = 0.0
        self.posted = 0
        self.start_s = 0.0
        self.has_arrived = False


class _Simulation:
    def __init__(
        self, program: Program, costs: Costs, network: NetworkModel, *, buffered: bool
    ) -> None:
        self._program = program
        self._costs = costs
        self._network = network
        self._bandwidth = [float(rate) for rate in network.bytes_per_s]
        self._buckets = _Buckets(self._bandwidth, map(float, network.burst_bytes))
        self._buffered = buffered
        self._lists = [list(batches(program, rank)) for rank in range(program.num_ranks)]
        self._at = [-1] * program.num_ranks  # number of the current batch of each rank
        self._open = [0] * program.num_ranks  # its messages and work that have not ended
        self._work_s = [0.0] * program.num_ranks  # work after its messages have arrived
        self._messages = self._all_messages()
        self._flows: dict[_SimulatedMessage, None] = {}  # under way, in order
        self._on_link: Counter[int] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._now = 0.0
        self._flows_at = 0.0
        self._intervals: list[Interval] = []
        self._end_s = [0.0] * program.num_ranks
        self._link_bytes: dict[int, float] = defaultdict(float)

    def run(self) -> Timeline:
        for rank in range(self._program.num_ranks):
            self._next_batch(rank)
        while self._events or self._flows:
            self._advance()
        stuck = [r for r, at in enumerate(self._at) if at < len(self._lists[r])]
        if stuck:
            ranks = ", ".join(map(str, stuck))
            msg = f"the program does not end: ranks {ranks} wait in a deadlock; validate it first"
            raise ConfigError(msg)
        self._intervals.sort(key=lambda i: (i.start_s, i.rank))
        return Timeline(self._intervals, self._end_s, dict(self._link_bytes))

    def _at_time(self, when_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, call))

    def _advance(self) -> None:
        """Go to the next moment at which something happens, and let all of it happen."""
        self._share()
        ends = [self._now + flow.left / flow.rate for flow in self._flows]
        first = self._events[0][0] if self._events else float("inf")
        empty = self._now + self._buckets.empty_in_s(self._flows)
        self._now = max(self._now, min([first, empty, *ends]))
        limit = self._now * (1 + SAME_TIME)
        self._flow_until(self._now)
        for flow, end in zip(list(self._flows), ends, strict=True):
            if end <= limit:
                self._arrive(flow)
        while self._events and self._events[0][0] <= limit:
            heapq.heappop(self._events)[2]()

    def _flow_until(self, when_s: float) -> None:
        passed = when_s - self._flows_at
        self._buckets.pass_s(passed, self._flows)
        for flow in self._flows:
            flow.left -= passed * flow.rate
        self._flows_at = when_s

    def _share(self) -> None:
        bandwidth, on_link, is_open = self._bandwidth, self._on_link, self._buckets.is_open
        for flow in self._flows:
            shares = (
                bandwidth[link] / on_link[link] * (OPEN if is_open(link) else 1.0)
                for link in flow.links
            )
            flow.rate = min(flow.max_rate, *shares)

    def _next_batch(self, rank: int) -> None:
        self._at[rank] += 1
        if self._at[rank] == len(self._lists[rank]):
            self._end_s[rank] = self._now
            return
        positions = self._lists[rank][self._at[rank]]
        actions = self._program.ranks[rank]
        vocabulary = self._program.vocabulary
        self._open[rank] = 1  # until all have been posted
        batch = (actions[i] for i in positions if vocabulary.role(actions[i]) != SEND)
        self._work_s[rank] = sum(self._costs.seconds(rank, action) for action in batch)
        _check_cost(self._work_s[rank], "seconds")
        for message in self._messages.get((rank, self._at[rank]), ()):
            self._post(message, is_send=message.ranks[0] == rank)
        self._close(rank)

    def _close(self, rank: int) -> None:
        """Count the end of one message or work of the batch of `rank`."""
        self._open[rank] -= 1
        if self._open[rank]:
            return
        seconds = self._work_s[rank]
        if not seconds:
            self._at_time(self._now, lambda: self._next_batch(rank))
            return
        positions = self._lists[rank][self._at[rank]]
        vocabulary, actions = self._program.vocabulary, self._program.ranks[rank]
        worked = [actions[i] for i in positions if vocabulary.role(actions[i]) != SEND]
        interval = Interval(rank, self._now, self._now + seconds, worked[0], len(worked))
        self._intervals.append(interval)
        self._at_time(interval.end_s, lambda: self._next_batch(rank))

    def _all_messages(self) -> dict[tuple[int, int], list[_SimulatedMessage]]:
        """Return the messages by (rank, number of the batch) of either end."""
        program, matching = self._program, match(self._program)
        if matching.alone:
            rank, position = matching.alone[0]
            what = program.vocabulary.describe(program.ranks[rank][position])
            msg = (
                f"the {what} of rank {rank} has no matching action on its peer: validate the "
                "program first"
            )
            raise ConfigError(msg)
        by_batch: dict[tuple[int, int], list[_SimulatedMessage]] = defaultdict(list)
        for pair in messages(program, matching):
            nbytes = sum(self._costs.nbytes(pair.source, action) for action in pair.sends)
            _check_cost(nbytes, "bytes")
            message = _SimulatedMessage(pair, nbytes)
            by_batch[pair.source, pair.posted].append(message)
            by_batch[pair.target, pair.awaited].append(message)
        return by_batch

    def _post(self, message: _SimulatedMessage, *, is_send: bool) -> None:
        message.posted += 1
        begins = is_send if self._buffered else message.posted == BOTH
        if begins:
            self._begin(message)
        if not (message.has_arrived or (is_send and self._buffered)):
            self._open[message.ranks[0 if is_send else 1]] += 1

    def _begin(self, message: _SimulatedMessage) -> None:
        route = self._network.route(*message.ranks, message.nbytes)
        message.links, message.left, message.max_rate = (
            route.links,
            message.nbytes,
            route.bytes_per_s,
        )
        message.start_s = self._now
        for link in route.links:
            self._link_bytes[link] += message.nbytes
        self._at_time(self._now + route.latency_s, lambda: self._flow(message))

    def _flow(self, message: _SimulatedMessage) -> None:
        if not message.nbytes or not message.links:
            self._arrive(message)
            return
        self._flows[message] = None
        self._on_link.update(message.links)

    def _arrive(self, message: _SimulatedMessage) -> None:
        if message in self._flows:
            del self._flows[message]
            self._on_link.subtract(message.links)
        message.has_arrived = True
        for rank, actions in zip(message.ranks, message.actions, strict=True):
            first, count = actions[0], len(actions)
            interval = Interval(rank, message.start_s, self._now, first, count, is_message=True)
            self._intervals.append(interval)
        source, target = message.ranks
        if not self._buffered:
            self._close(source)
        if message.posted == BOTH:
            self._close(target)


class _Buckets:
    """Tokens of the links that have a bucket, in bytes.

    A link is open, and much faster than its rate, while it has tokens. A link with an empty bucket
    opens again after a rest.
    """

    def __init__(self, rates: Sequence[float], sizes: Iterable[float]) -> None:
        self._rates = rates
        self._sizes = {link: size for link, size in enumerate(sizes) if size}
        self._tokens = dict(self._sizes)
        self._dry: set[int] = set()

    def is_open(self, link: int) -> bool:
        return link in self._tokens and link not in self._dry

    def empty_in_s(self, flows: Iterable[_SimulatedMessage]) -> float:
        """Return the seconds until the first token bucket of a link is empty, if `flows` go on."""
        drains = ((link, -rate) for link, rate in self._fill_rates(flows).items() if rate < 0)
        return min(
            (self._tokens[link] / rate for link, rate in drains if link not in self._dry),
            default=float("inf"),
        )

    def pass_s(self, seconds: float, flows: Iterable[_SimulatedMessage]) -> None:
        """Advance the time by `seconds` in which `flows` are under way."""
        if not self._sizes or not seconds:
            return
        filled = self._fill_rates(flows)
        for link, size in self._sizes.items():
            rate = filled.get(link, self._rates[link])
            tokens = self._tokens[link] = min(size, self._tokens[link] + seconds * rate)
            if link not in filled:
                self._dry.discard(link)
            elif tokens <= size * LITTLE:
                self._tokens[link] = 0.0
                self._dry.add(link)

    def _fill_rates(self, flows: Iterable[_SimulatedMessage]) -> dict[int, float]:
        """Return the tokens per second that come into the buckets of links in use."""
        rates: dict[int, float] = {}
        for flow in flows if self._sizes else ():
            for link in flow.links:
                if link in self._sizes:
                    rates[link] = rates.get(link, self._rates[link]) - flow.rate
        return rates


def _check_cost(value: float, unit: str) -> None:
    if not 0 <= value < float("inf"):
        msg = f"the {unit} of an action must be finite and not negative, got {value}"
        raise ConfigError(msg)
