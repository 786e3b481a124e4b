"""Agreement on the next operations, cycle by cycle: a state machine on every rank. Pure.

It has no tensors, threads, clocks or messages. A cycle has at most two exchanges, and usually one:

    all ranks   open()        one bitmask: cached operations that this rank is ready for,
                              and whether it has new requests
                              ---- "and" over all ranks ----
    all ranks   combined()    operations that all ranks are ready for
                              if no rank has new requests: conclude(None)
    all ranks   own_list()    this rank's new requests            ---- to rank 0 ----
    rank 0      answer()      compares them, by name              ---- to all ----
    all ranks   conclude()    batches, in the same order on all ranks

In steady state rank 0 has no special role. The common state of the ranks (cache, order) changes
only in `combined` and `conclude`, by data that all ranks have received; so it is equal on all ranks
without being compared.

The bitmask, from its lowest bit: quiet, working, joined, sound, broken, then for each position of
the cache whether this rank is ready for it, then whether it is still valid for this rank. A rank
on which an operation has failed next sends only `BROKEN`. If all ranks do so, only the operation
fails; if some do not, the engine ends on all ranks.

If a caller passes invalid arguments, its rank sends a *refusal* instead of the request, so that the
other ranks raise that error instead of waiting. The refused call counts as a call: later requests
of the name on this rank wait until the refusal has met the other ranks' requests.

Source: Sergeev & Del Balso 2018, sec. 3; the response cache of Horovod 0.16.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from braid.compat.horovod.fusion.autotune import Settings
from braid.compat.horovod.fusion.batching import FusedBatch, batches
from braid.compat.horovod.fusion.coordinator import Coordinator
from braid.compat.horovod.fusion.options import StateOptions
from braid.compat.horovod.fusion.request import (
    JOINABLE,
    NOTHING,
    RankList,
    Request,
    Response,
    ResponseList,
    check_sendable,
    read_answer,
    read_list,
)
from braid.compat.horovod.fusion.response_cache import Lookup, ResponseCache
from braid.compat.horovod.fusion.stall import Stall, StallInspector
from braid.errors import CommError, ConfigError

__all__ = ["CycleOutcome", "FusionState"]

QUIET, WORKING, JOINED, SOUND, BROKEN = 1, 2, 4, 8, 16
NUM_FLAGS = 5
WORD_BYTES = 8
MAX_PLANS = 64


@dataclass(frozen=True, slots=True)
class CycleOutcome:
    """Result of a cycle of agreement, the same on all ranks except for `refused_here`.

    Attributes:
        batches: Batches to carry out in this order; batches with an error are refused.
        last_joined: Position of the rank that joined last, when all have joined; -1 otherwise.
        stalls: Names that wait for ranks that have not submitted them.
        stop: Reason to end the engine now; empty to continue.
        refused_here: Names that this rank has refused, and for which it therefore has no tensor.
        cycle_time_s: New time for which requests are collected, if it changes.
    """

    batches: Sequence[FusedBatch] = ()
    last_joined: int = -1
    stalls: Sequence[Stall] = ()
    stop: str = ""
    refused_here: Collection[str] = field(default=(), compare=False)
    cycle_time_s: float | None = None


@dataclass(slots=True)
class _Mine:
    """A pending request of this rank."""

    request: Request
    since_s: float
    position: int = -1  # in the cache, if it was found there
    sent: bool = False  # to rank 0


class _Planned(NamedTuple):
    """Batches for a set of ready positions."""

    positions: tuple[int, ...]
    bits: int
    names: tuple[str, ...]
    batches: list[FusedBatch]


class _Cycle(NamedTuple):
    """State between `combined` and `conclude`."""

    ready: _Planned
    all_work: bool


class FusionState:
    """State machine of one rank that agrees with the others on the next operations.

    Args:
        rank: Position of this rank.
        ranks: Global ranks, for messages.
        options: Options, the same on all ranks.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], options: StateOptions | None = None
    ) -> None:
        self.options = options or StateOptions()
        self._rank = rank
        self._ranks = tuple(ranks)
        self._mine: dict[str, _Mine] = {}
        self._unsent: dict[str, _Mine] = {}
        self._refused: set[str] = set()  # names of refusals that have not met all ranks
        self._behind: list[tuple[Sequence[Request], float]] = []  # calls that wait for earlier ones
        self._hits = 0  # bits of positions that this rank is ready for
        self._changed = 0  # bits of positions that are no longer valid for this rank
        self._joined = False
        self._join_notice_due = False
        self._join_notice_sent = False  # by the last word
        self._stopping = ""
        self._proposed: Settings | None = None
        self._threshold_bytes = self.options.threshold_bytes
        self._cache = ResponseCache(self.options.cache_capacity)
        self._announced = 0  # bits of ready positions in the last bitmask
        self._plans: dict[int, _Planned] = {}
        self._cycle = _Cycle(self._plan(0), all_work=True)
        self._coordinator = Coordinator(ranks) if rank == 0 else None
        self._inspector = StallInspector(
            self.options.stall_check_s, self.options.stall_shutdown_s, ranks
        )
        self._num_words = -(-(NUM_FLAGS + 2 * self.options.cache_capacity) // (8 * WORD_BYTES))
        self._all = (1 << self.options.cache_capacity) - 1

    # Events of this rank.

    def submit(self, request: Request, now_s: float) -> None:
        """Add a request of this rank; see `submit_all`."""
        self.submit_all([request], now_s)

    def submit_all(self, requests: Sequence[Request], now_s: float) -> None:
        """Add the requests of one call on this rank, all or none.

        Raises:
            ConfigError: One of the names is in flight on this rank, this rank has joined, or a
                request cannot be sent.
        """
        self._check(requests)
        if any(request.name in self._refused for request in requests):
            self._mine |= {request.name: _Mine(request, now_s) for request in requests}
            self._behind.append((requests, now_s))
            return
        for request in requests:
            self._enter(request, now_s)

    def refuse(self, request: Request, now_s: float) -> None:
        """Make operations of a name fail on the other ranks with the error `request.refusal`.

        It has no effect if this rank has joined.
        """
        check_sendable(request)
        if self._joined:
            return
        if request.name in self._refused or request.name in self._mine:
            self._behind.append(([request], now_s))
        else:
            self._enter_refusal(request, now_s)

    def _enter_refusal(self, request: Request, now_s: float) -> None:
        self._refused.add(request.name)
        self._unsent[request.name] = _Mine(request, now_s)
        _, position = self._cache.look_up(request)
        for member in {position, *self._cache.members(request.group)} - {-1}:
            self._changed |= 1 << member

    def _enter(self, request: Request, now_s: float) -> None:
        lookup, position = self._cache.look_up(request)
        mine = self._mine[request.name] = _Mine(request, now_s, position)
        if lookup is Lookup.HIT:
            self._hits |= 1 << position
            return
        self._unsent[request.name] = mine
        if lookup is Lookup.CHANGED:
            self._changed |= 1 << position
        for member in self._cache.members(request.group):  # the group's members have changed
            self._changed |= 1 << member

    def _check(self, requests: Sequence[Request]) -> None:
        """Check whether this rank may submit these requests; raise as `submit_all` does."""
        where = f"on rank {self._ranks[self._rank]}"
        seen: set[str] = set()
        for request in requests:
            name: Any = request.name  # callers may pass any type
            if not isinstance(name, str) or self._cache.look_up(request)[0] is not Lookup.HIT:
                check_sendable(request)
            if name in self._mine or name in seen:
                msg = (
                    f"{name!r} is already in progress {where}: wait for the first operation, or "
                    "give the two different names"
                )
                raise ConfigError(msg)
            seen.add(name)
        if self._joined and seen:
            msg = (
                f"{requests[0].name!r} was submitted {where}, which has called join(): wait until "
                "all ranks have joined before the next operation"
            )
            raise ConfigError(msg)

    def join(self) -> None:
        """Record that this rank submits no more requests until all ranks have joined."""
        self._joined = self._join_notice_due = True

    def stop(self, reason: str) -> None:
        """Request the end of the engine on all ranks, with a reason for their errors."""
        self._stopping = reason

    def propose(self, settings: Settings) -> None:
        """On rank 0, propose new settings for all ranks, from their next exchange on."""
        self._proposed = settings

    @property
    def has_new(self) -> bool:
        """Whether this rank has requests or notices that it has not sent to the other ranks."""
        unannounced = self._hits & ~self._announced
        other = self._join_notice_due or self._stopping or self._proposed
        return bool(self._unsent or other or unannounced)

    @property
    def num_pending(self) -> int:
        """Number of pending requests of this rank."""
        return len(self._mine)

    def broken(self) -> bytes:
        """Return the bitmask that a rank sends if an operation has failed on it."""
        return BROKEN.to_bytes(self._num_words * WORD_BYTES, "little")

    def all_broken(self, bitmask: bytes) -> bool:
        """Return whether the combined bitmask shows that an operation has failed on all ranks."""
        return bool(int.from_bytes(bitmask, "little") & BROKEN)

    # One cycle.

    def open(self, now_s: float) -> bytes:
        """Begin a cycle: return the bitmask of this rank's cached requests, in 64-bit numbers."""
        self._renegotiate_stalled(now_s)
        self._join_notice_sent = self._joined
        if self._join_notice_due:  # a hit of this rank only, with all others joined, has no bit
            self._changed |= self._hits
        quiet = not (self._unsent or self._join_notice_due or self._stopping or self._changed)
        if self._coordinator is not None and quiet:
            quiet = self._proposed is None and not self._inspector.is_due(
                self._coordinator.waiting(), now_s
            )
        bitmask = SOUND | QUIET * quiet | (JOINED if self._joined else WORKING)
        hits = self._all if self._joined else self._hits
        valid = self._all & ~self._changed
        bitmask |= (hits | valid << self.options.cache_capacity) << NUM_FLAGS
        self._announced = self._hits
        return bitmask.to_bytes(self._num_words * WORD_BYTES, "little")

    def combined(self, bitmask: bytes) -> bool:
        """Process all ranks' combined bitmask; return whether ranks must exchange request lists.

        Raises:
            CommError: An operation has failed on another rank but not on this one.
        """
        number = int.from_bytes(bitmask, "little")
        if not number & SOUND:
            msg = "an operation of this rank failed on another rank: see the error of that rank"
            raise CommError(msg)
        fields = number >> NUM_FLAGS
        invalid = ~(fields >> self.options.cache_capacity) & self._all
        if invalid:
            self._renegotiate(self._cache.erase(_positions(invalid)))
            self._changed &= ~invalid
        all_joined = number & JOINED  # all ranks set all bits then
        ready = self._plan(0 if all_joined else fields & self._cache.bits)
        self._cycle = _Cycle(ready, all_work=bool(number & WORKING))
        return not number & QUIET

    def own_list(self, now_s: float) -> bytes:
        """Return the encoded new requests and notices of this rank, to send to rank 0."""
        new = list(self._unsent.values())
        for mine in new:
            mine.sent = True
        self._unsent.clear()
        joined = (
            self._join_notice_due and self._join_notice_sent
        )  # after the requests that it submitted before
        self._join_notice_due = self._join_notice_due and not joined
        ages = [now_s - mine.since_s for mine in new]
        return msgspec.msgpack.encode(
            RankList([mine.request for mine in new], ages, joined, self._stopping)
        )

    def answer(self, lists: Sequence[bytes], now_s: float) -> bytes:
        """On rank 0, compare the lists of all ranks, in rank order; return the encoded answer."""
        table = self._coordinator
        if table is None:
            msg = (
                f"answer() was called on rank {self._rank} of the process set: call it on rank 0 "
                "only"
            )
            raise ConfigError(msg)
        stop = ""
        for rank, data in enumerate(lists):
            news = read_list(data)
            for request, age_s in zip(news.requests, news.ages_s, strict=True):
                table.add(rank, [request], now_s - age_s)
            if news.joined:
                table.join(rank)
            stop = stop or news.stopping
        responses = table.ready()
        last = table.all_joined()
        stalls, fatal = self._inspector.inspect(table.waiting(), table.joined, now_s)
        settings, self._proposed = self._proposed, None
        decided = ResponseList(
            responses, -1 if last is None else last, stalls, stop or fatal, settings
        )
        return msgspec.msgpack.encode(decided)

    def conclude(self, answer: bytes | None = None) -> CycleOutcome:
        """Return the outcome of the cycle, which is one exchange between the ranks.

        Args:
            answer: Answer of rank 0, if ranks have exchanged lists.
        """
        ready, all_work = self._cycle
        self._remove(ready)
        if answer is None and all_work:
            self._enter_waiting()
            return CycleOutcome(ready.batches)
        cached = [self._cached(position, all_work=all_work) for position in ready.positions]
        new = NOTHING if answer is None else read_answer(answer)
        behind = self._waiting_names()
        refused = {r.name for r in new.responses if r.name in self._refused or r.name in behind}
        requests = [
            None if response.name in refused else self._mine.pop(response.name, None)
            for response in new.responses
        ]
        self._refused -= refused
        asked = [None if mine is None else mine.request for mine in requests]
        self._renegotiate(self._cache.put(new.responses, asked))
        if new.last_joined >= 0:
            self._joined = False
        planned = self._divide([*cached, *new.responses])
        cycle_time_s = None
        if new.settings is not None:
            self._threshold_bytes, cycle_time_s = new.settings
            self._plans.clear()
        self._enter_waiting()
        return CycleOutcome(planned, new.last_joined, new.stalls, new.stop, refused, cycle_time_s)

    @property
    def digest(self) -> int:
        """Digest of the common state of the ranks, for tests."""
        return self._cache.digest

    # Parts.

    def _enter_waiting(self) -> None:
        """Add the calls that waited for earlier calls of the same names, in their order."""
        if not self._behind:
            return
        blocked = self._refused | (self._mine.keys() - self._waiting_names())
        behind, self._behind = self._behind, []
        for requests, since_s in behind:
            names = {request.name for request in requests}
            waits = not blocked.isdisjoint(names)
            blocked |= names
            if waits:
                self._behind.append((requests, since_s))
            elif requests[0].refusal:
                self._enter_refusal(requests[0], since_s)
            else:
                for request in requests:
                    self._enter(request, since_s)

    def _waiting_names(self) -> set[str]:
        """Return the names of requests that wait behind refusals."""
        return {request.name for call, _ in self._behind for request in call if not request.refusal}

    def _plan(self, bits: int) -> _Planned:
        """Return the batches for these positions, cached since they repeat in every step."""
        planned = self._plans.get(bits)
        if planned is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            ready = self._whole(_positions(bits))
            responses = [self._cache.response(position) for position in ready]
            planned = self._plans[bits] = _Planned(
                tuple(ready),
                sum(1 << position for position in ready),
                tuple(response.name for response in responses),
                self._divide(responses),
            )
        return planned

    def _divide(self, responses: Sequence[Response]) -> list[FusedBatch]:
        options = self.options
        return batches(responses, self._threshold_bytes, split_groups=options.split_groups)

    def _cached(self, position: int, *, all_work: bool) -> Response:
        """Return a cached response; a refused one if it needs all ranks and one has joined."""
        response = self._cache.response(position)
        if all_work or response.request.kind in JOINABLE:
            return response
        error = (
            f"{response.request.kind} of {response.name!r} needs all ranks, but a rank has "
            "called join(): after join() only all_reduce and barrier work"
        )
        return Response(response.name, response.request, error=error)

    def _whole(self, ready: list[int]) -> list[int]:
        """Return the positions without those of incomplete explicit groups."""
        groups = {self._cache.response(p).request.group for p in ready} - {""}
        if not groups:
            return ready
        known = set(ready)
        partial: set[int] = set()
        for group in groups:
            members = self._cache.members(group)
            if not members <= known:
                partial |= members
        return [position for position in ready if position not in partial]

    def _remove(self, ready: _Planned) -> None:
        """Remove this rank's requests at positions that are carried out now."""
        for name in ready.names:
            self._mine.pop(name, None)
        self._hits &= ~ready.bits
        self._announced &= ~ready.bits
        self._cache.use(ready.positions)

    def _renegotiate(self, names: Sequence[str]) -> None:
        """Mark pending requests of names that left the cache, to be sent to rank 0."""
        if names:
            self._plans.clear()
        for name in names:
            mine = self._mine.get(name)
            if mine is not None and mine.position >= 0:
                bit = 1 << mine.position
                self._hits &= ~bit
                self._announced &= ~bit
                self._changed &= ~bit
                mine.position = -1
                if not mine.sent:
                    self._unsent[name] = mine

    def _renegotiate_stalled(self, now_s: float) -> None:
        """Negotiate long-pending cached requests by name again.

        Only then does rank 0 know which ranks have submitted them.
        """
        limits = {self.options.stall_check_s, self.options.stall_shutdown_s} - {0}
        limit = min(limits, default=0)
        if not limit or not self._hits:
            return
        for mine in self._mine.values():
            if now_s - mine.since_s < limit:
                break  # requests are in the order of submission
            if mine.position >= 0 and not mine.sent:
                self._changed |= 1 << mine.position

    def __repr__(self) -> str:
        return f"FusionState({len(self._mine)} in flight, {self._cache!r})"


def _positions(bits: int) -> list[int]:
    """Return the positions of the set bits, from the lowest."""
    positions = []
    while bits:
        low = bits & -bits
        positions.append(low.bit_length() - 1)
        bits ^= low
    return positions
