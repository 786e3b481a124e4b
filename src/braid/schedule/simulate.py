"""How long a program takes on a network, without running it.

Every rank goes through its list; what it posts together is under way at the same time. Messages of
one round from one rank to another travel as one. A message begins when both ends have been posted
(rendezvous) or when its send has (buffered), waits for the latency of its route, and then moves at
the rate of its slowest link, which it shares evenly with what is on that link at that time. So
nothing has to be assumed about who waits for whom, and a link that is oversubscribed slows exactly
those who use it.

    rank 0   |post| latency |======= bytes at the rate of the slowest link =======| add |post| ...
    rank 1        |post ....|=====================================================| add |post| ...

Rates are those of even sharing link by link (no rank gets what another leaves of its share), which
is what TCP flows of equal latency come near to. A link may have a bucket of tokens, as clouds limit
their networks: after a rest it lets so much through beside its rate, and when that is used up it
has its rate until it rests again.

Source: the fluid model of network simulators; H. Casanova et al., SimGrid, JPDC 74 (2014).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from braid.errors import ConfigError
from braid.schedule.matching import Message, match, messages
from braid.schedule.program import SEND, Action, Program, batches

__all__ = ["Costs", "Interval", "Network", "Route", "Timeline", "simulate"]

BOTH = 2  # ends of a message
OPEN = 1e3  # times its rate at which a link lets through what is in its bucket, if nothing else limits that
SAME_TIME = 1e-12  # events that differ by less than this share of the time are simultaneous: sums of floats differ by order

LITTLE = 1e-9  # share of a bucket that is nothing


class Route(NamedTuple):
    """The way from one rank to another.

    Attributes:
        latency_s: Seconds before the first byte comes.
        links: Numbers of the links that it uses.
        bytes_per_s: What one message of its size gets at most, however idle the links are.
    """

    latency_s: float
    links: tuple[int, ...]
    bytes_per_s: float = float("inf")


class Network(Protocol):
    """What messages travel over."""

    @property
    def bytes_per_s(self) -> Iterable[float]:
        """Of every link."""
        ...

    @property
    def burst_bytes(self) -> Iterable[float]:
        """What every link lets through beside its rate after a rest."""
        ...

    def route(self, source: int, target: int, nbytes: float) -> Route:
        """Way of a message of `nbytes` from a rank to another one."""
        ...


class Costs(NamedTuple):
    """What actions cost.

    Attributes:
        nbytes: Bytes of a message, by its send or receive.
        seconds: Of this rank's own work: a local action, or what a receive needs when it has come.
    """

    nbytes: Callable[[int, Action], float]
    seconds: Callable[[int, Action], float]


class Interval(NamedTuple):
    """What a rank did for some time.

    Attributes:
        rank: Whose.
        start_s: Seconds since the start: when the message began to travel, or the work to be done.
        end_s: When it was over.
        action: The first of those that did it together.
        num_actions: How many did.
        is_message: Whether it was under way, rather than at work.
    """

    rank: int
    start_s: float
    end_s: float
    action: Action
    num_actions: int = 1
    is_message: bool = False


class Timeline(NamedTuple):
    """What happened when.

    Attributes:
        intervals: Of all ranks, by start.
        end_s: When each rank was ready.
        link_bytes: Bytes over each link.
    """

    intervals: list[Interval]
    end_s: list[float]
    link_bytes: dict[int, float]

    @property
    def seconds(self) -> float:
        """When the last rank was ready."""
        return max(self.end_s, default=0.0)


def simulate(
    program: Program, costs: Costs, network: Network, *, buffered: bool = False
) -> Timeline:
    """Carry `program` out in simulated time.

    Args:
        program: Valid.
        costs: Bytes and seconds of its actions.
        network: What messages travel over.
        buffered: Whether messages travel before their receives are posted.

    Raises:
        ConfigError: It comes to nothing: a message has no partner, the program deadlocks, or a cost
            is negative or not finite.
    """
    return _Simulation(program, costs, network, buffered=buffered).run()


class _Message:
    """What one rank sends to another in one round, and that one receives in one round."""

    __slots__ = (
        "actions",
        "has_come",
        "left",
        "links",
        "most",
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
        self.left = self.rate = self.most = 0.0
        self.posted = 0
        self.start_s = 0.0
        self.has_come = False


class _Simulation:
    def __init__(self, program: Program, costs: Costs, network: Network, *, buffered: bool) -> None:
        self._program = program
        self._costs = costs
        self._network = network
        self._bandwidth = [float(rate) for rate in network.bytes_per_s]
        self._buckets = _Buckets(self._bandwidth, map(float, network.burst_bytes))
        self._buffered = buffered
        self._lists = [list(batches(program, rank)) for rank in range(program.num_ranks)]
        self._at = [-1] * program.num_ranks  # which batch a rank is in
        self._open = [0] * program.num_ranks  # messages and work of it that have not ended
        self._work_s = [0.0] * program.num_ranks  # to be done when the messages have come
        self._messages = self._all_messages()
        self._flows: dict[_Message, None] = {}  # under way, in order
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
            msg = (
                f"expected a program that ends, found that ranks {ranks} wait for ever: "
                "validate it first"
            )
            raise ConfigError(msg)
        self._intervals.sort(key=lambda i: (i.start_s, i.rank))
        return Timeline(self._intervals, self._end_s, dict(self._link_bytes))

    # Time.

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
            flow.rate = min(flow.most, *shares)

    # Ranks.

    def _next_batch(self, rank: int) -> None:
        self._at[rank] += 1
        if self._at[rank] == len(self._lists[rank]):
            self._end_s[rank] = self._now
            return
        positions = self._lists[rank][self._at[rank]]
        actions = self._program.ranks[rank]
        vocabulary = self._program.vocabulary
        self._open[rank] = 1  # until all have been posted
        own = (actions[i] for i in positions if vocabulary.role(actions[i]) != SEND)
        self._work_s[rank] = sum(self._costs.seconds(rank, action) for action in own)
        _check_cost(self._work_s[rank], "seconds")
        for message in self._messages.get((rank, self._at[rank]), ()):
            self._post(message, is_send=message.ranks[0] == rank)
        self._close(rank)

    def _close(self, rank: int) -> None:
        """One thing of the batch of `rank` has ended."""
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

    # Messages.

    def _all_messages(self) -> dict[tuple[int, int], list[_Message]]:
        """By (rank, number of the batch) of either end."""
        program, matching = self._program, match(self._program)
        if matching.alone:
            rank, position = matching.alone[0]
            what = program.vocabulary.describe(program.ranks[rank][position])
            msg = (
                f"expected a partner for every message, found none for the {what} of rank "
                f"{rank}: validate the program first"
            )
            raise ConfigError(msg)
        by_batch: dict[tuple[int, int], list[_Message]] = defaultdict(list)
        for found in messages(program, matching):
            nbytes = sum(self._costs.nbytes(found.source, action) for action in found.sends)
            _check_cost(nbytes, "bytes")
            message = _Message(found, nbytes)
            by_batch[found.source, found.posted].append(message)
            by_batch[found.target, found.awaited].append(message)
        return by_batch

    def _post(self, message: _Message, *, is_send: bool) -> None:
        message.posted += 1
        begins = is_send if self._buffered else message.posted == BOTH
        if begins:
            self._begin(message)
        if not (message.has_come or (is_send and self._buffered)):
            self._open[message.ranks[0 if is_send else 1]] += 1

    def _begin(self, message: _Message) -> None:
        route = self._network.route(*message.ranks, message.nbytes)
        message.links, message.left, message.most = route.links, message.nbytes, route.bytes_per_s
        message.start_s = self._now
        for link in route.links:
            self._link_bytes[link] += message.nbytes
        self._at_time(self._now + route.latency_s, lambda: self._flow(message))

    def _flow(self, message: _Message) -> None:
        if not message.nbytes or not message.links:
            self._arrive(message)
            return
        self._flows[message] = None
        self._on_link.update(message.links)

    def _arrive(self, message: _Message) -> None:
        if message in self._flows:
            del self._flows[message]
            self._on_link.subtract(message.links)
        message.has_come = True
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
    """The tokens of the links that have a bucket, in bytes.

    A link is open, and much faster than its rate, while it has tokens. One whose bucket ran empty
    opens again when it has had a rest.
    """

    def __init__(self, rates: Sequence[float], sizes: Iterable[float]) -> None:
        self._rates = rates
        self._sizes = {link: size for link, size in enumerate(sizes) if size}
        self._tokens = dict(self._sizes)
        self._dry: set[int] = set()

    def is_open(self, link: int) -> bool:
        return link in self._tokens and link not in self._dry

    def empty_in_s(self, flows: Iterable[_Message]) -> float:
        """Seconds until the next bucket is empty."""
        drains = ((link, -rate) for link, rate in self._fill_rates(flows).items() if rate < 0)
        return min(
            (self._tokens[link] / rate for link, rate in drains if link not in self._dry),
            default=float("inf"),
        )

    def pass_s(self, seconds: float, flows: Iterable[_Message]) -> None:
        """Let time go by in which these are under way."""
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

    def _fill_rates(self, flows: Iterable[_Message]) -> dict[int, float]:
        """Tokens per second that come in of links in use."""
        rates: dict[int, float] = {}
        for flow in flows if self._sizes else ():
            for link in flow.links:
                if link in self._sizes:
                    rates[link] = rates.get(link, self._rates[link]) - flow.rate
        return rates


def _check_cost(value: float, unit: str) -> None:
    if not 0 <= value < float("inf"):
        msg = f"expected {unit} of an action that are finite and not negative, found {value}"
        raise ConfigError(msg)
