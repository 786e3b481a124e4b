"""Computes the figures of a run under faults from its log: causes, recoveries, goodput, lost steps.

*Goodput* is the number of finished steps, divided by the number of steps that the surviving ranks
could have finished. That number integrates, over time, the undisturbed rate of the number of ranks
that trained or could have trained. Killed ranks do not count after the fault; stopped and slow
ranks do. So goodput contains the cost of recoveries, meetings of the members, transfers of state
and waits, but not the missing work of ranks that have died.

The undisturbed rate of m ranks is measured in this run: steps per second with m ranks while no
fault lasted and no process was starting. Without such steps, steps while a process was starting
are used, although they share the cores with it, and without those all steps with m ranks.

A *recovery* lasts from a fault to the end of the next step: of an epoch without the rank, if it is
gone, or of the rank itself, if it was stopped. A step is *lost* if some rank had finished it, and
the run went on from an earlier state.

A cause is *right* if the launcher's log names the rank and its fault, *unknown* if it does not name
the rank, and *wrong* if it names another cause. Naming a rank without a fault is also wrong, and so
is a full disk that ends a rank.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from braid.runtime.diagnose.run_events import RunEvent

__all__ = ["ChaosAccount", "FaultAccount", "Strike", "account_of"]

Judgement: TypeAlias = Literal["right", "wrong", "unknown"]
DEATHS = frozenset({"lost", "failed"})
FATAL = frozenset({"kill", "two", "newcomer"})
LOST_AFTER_S = 30.0  # a host that is cut off for longer is lost
NO_SPACE = os.strerror(errno.ENOSPC)
NOTICED_S = 1.0  # a stop may be noticed this long after its end
# kind -> kind of the event that names it, and words in its text
NAMED_BY: Mapping[str, tuple[tuple[str, str], ...]] = {
    "kill": (("lost", "SIGKILL"), ("failed", "SIGKILL")),
    "two": (("lost", "SIGKILL"), ("failed", "SIGKILL")),
    "newcomer": (("lost", "SIGKILL"), ("failed", "SIGKILL")),
    "leave": (("left", "asked to end"), ("lost", "SIGTERM"), ("failed", "SIGTERM")),
    "stop": (("stopped", "SIGSTOP"),),
    "slow": (("stopped", "SIGSTOP"), ("left", "as long as its peers")),
    "bitflip": (("left", "has computed other gradients"),),
    "disk": (("notice", "cannot write to"),),
    "partition": (("lost", "has not answered"), ("failed", "has not answered")),
}


class Strike(msgspec.Struct, frozen=True):
    """A fault that `braid chaos` has caused in a run.

    Attributes:
        unix_s: Time, in seconds since 1970.
        kind: Kind of the fault.
        ranks: Ranks that were struck; empty for a fault of the host.
        lasts_s: Seconds until the fault ends; 0 for a death.
    """

    unix_s: float
    kind: str
    ranks: tuple[int, ...]
    lasts_s: float = 0.0


class FaultAccount(msgspec.Struct, frozen=True):
    """Consequences of one injected fault: the logged cause, and the time to recover.

    Attributes:
        strike: The fault; its kind is `none` if the launcher named a rank that no fault struck.
        cause: Cause that the launcher named, in its words.
        judgement: `right`, `wrong` or `unknown`: whether the launcher named the right cause.
        recovery_s: Seconds to the end of the next step; NaN if no step followed.
    """

    strike: Strike
    cause: str
    judgement: Judgement
    recovery_s: float


class ChaosAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a run under faults: steps, lost steps and recoveries.

    Attributes:
        begin_s: Time of the first finished step, in seconds since 1970.
        end_s: Time of the end of the run, in seconds since 1970; later events do not count.
        num_steps: Number of steps that were finished between `begin_s` and `end_s`.
        num_possible: Number of steps that the surviving ranks could have finished.
        num_possible_by_all: Number of steps that could have been finished by the largest number of
            ranks that ever ran at the same time.
        num_lost_steps: Number of finished steps that were done again.
        faults: Faults, in the order of their times.
        rates: Undisturbed steps per second, by number of members.
    """

    begin_s: float
    end_s: float
    num_steps: int
    num_possible: float
    num_possible_by_all: float
    num_lost_steps: int
    faults: tuple[FaultAccount, ...]
    rates: dict[int, float]

    @property
    def goodput(self) -> float:
        """Finished steps, divided by the steps that the surviving ranks could have finished."""
        return self.num_steps / self.num_possible if self.num_possible else math.nan

    @property
    def recoveries_s(self) -> tuple[float, ...]:
        """Seconds of all recoveries that ended, the shortest first."""
        known = (fault.recovery_s for fault in self.faults if fault.strike.kind != "none")
        return tuple(sorted(seconds for seconds in known if math.isfinite(seconds)))

    @property
    def num_struck(self) -> int:
        """Number of injected faults."""
        return sum(fault.strike.kind != "none" for fault in self.faults)

    @property
    def num_right(self) -> int:
        """Number of faults that the launcher named rightly."""
        return sum(fault.judgement == "right" for fault in self.faults)


class _Stretch(NamedTuple):
    """Time during which the number of ranks that can train does not change."""

    begin_s: float
    end_s: float
    num_ranks: int


def account_of(
    strikes: Sequence[Strike],
    events: Sequence[RunEvent],
    finished: Iterable[tuple[int, int, float]],
    end_s: float,
) -> ChaosAccount:
    """Compute a run's steps, lost steps and recoveries from its faults and its log.

    Args:
        strikes: Faults, in the order of their times.
        events: Launcher's log of the run.
        finished: Rank, number and time of each finished step.
        end_s: Time at which the run was ended; later events do not count.
    """
    events = [event for event in events if event.unix_s <= end_s]
    rows = sorted((t, rank, step) for rank, step, t in finished if t <= end_s)
    full = _deaths_of_full_disk(strikes, events)
    faults = [
        _fault(strike, events, rows, [event for last, event in full if last is strike])
        for strike in strikes
    ]
    faults += _unexplained(strikes, events, [event for _, event in full])
    faults.sort(key=lambda fault: fault.strike.unix_s)
    ends = _step_ends(rows)
    if not ends:
        return ChaosAccount(
            begin_s=end_s, end_s=end_s, num_steps=0, num_possible=0.0, num_possible_by_all=0.0,
            num_lost_steps=0, faults=tuple(faults), rates={},
        )  # fmt: skip
    begin_s = ends[0][1]
    pieces = list(_pieces(strikes, events, begin_s, end_s))
    rates = _rates(ends, pieces, _fault_times(faults), _start_times(events, end_s))
    possible = sum((p.end_s - p.begin_s) * _rate(rates, p.num_ranks) for p in pieces)
    most = max((piece.num_ranks for piece in pieces), default=0)
    return ChaosAccount(
        begin_s=begin_s,
        end_s=end_s,
        num_steps=ends[-1][0] - ends[0][0],
        num_possible=possible,
        num_possible_by_all=(end_s - begin_s) * _rate(rates, most),
        num_lost_steps=_num_lost(events, ends),
        faults=tuple(faults),
        rates=rates,
    )


def _fault(
    strike: Strike,
    events: Sequence[RunEvent],
    rows: Sequence[tuple[float, int, int]],
    deaths: Sequence[RunEvent],
) -> FaultAccount:
    """Return the consequences of a fault; `deaths` are ends of ranks by a full disk."""
    causes, judgement = _judged(strike, events)
    recovery_s = _recovery_s(strike, events, rows)
    if strike.kind == "disk":
        if deaths:
            causes, judgement = [f"rank {e.rank} {e.text}" for e in deaths], "wrong"
        elif not causes and math.isfinite(recovery_s) and not _has_gap(strike, rows):
            causes, judgement = ["no line of the run was refused"], "right"
    if strike.kind == "partition" and not causes and strike.lasts_s < LOST_AFTER_S:
        causes, judgement = ["no rank was lost"], "right"
    return FaultAccount(strike, "; ".join(causes), judgement, recovery_s)


def _deaths_of_full_disk(
    strikes: Sequence[Strike], events: Sequence[RunEvent]
) -> list[tuple[Strike, RunEvent]]:
    """Return the ends of ranks by a full disk, each with the last disk fault before it."""
    disks = [strike for strike in strikes if strike.kind == "disk"]
    return [
        (before[-1], event)
        for event in events
        if event.kind in DEATHS and NO_SPACE in event.text
        if (before := [strike for strike in disks if strike.unix_s <= event.unix_s])
    ]


def _judged(strike: Strike, events: Sequence[RunEvent]) -> tuple[list[str], Judgement]:
    """Return the causes that the launcher named for a fault, and whether they are right."""
    last_s = math.inf if strike.kind in FATAL | {"leave"} else strike.lasts_s + NOTICED_S
    first_s = -math.inf if strike.kind == "disk" else 0.0  # the launcher names it once
    causes: list[str] = []
    judgements: list[Judgement] = []
    for rank in strike.ranks or (-1,):
        named = [
            event
            for event in events
            if event.rank == rank
            and event.kind in DEATHS | {"left", "stopped", "notice"}
            and first_s <= event.unix_s - strike.unix_s <= last_s
        ]
        right = [
            event
            for event in named
            if any(
                event.kind == kind and words in event.text for kind, words in NAMED_BY[strike.kind]
            )
        ]
        chosen = (right or named)[:1]
        causes += [f"rank {rank} {e.text}" if rank >= 0 else e.text for e in chosen]
        judgements.append("right" if right else "wrong" if named else "unknown")
    worst: tuple[Judgement, ...] = ("wrong", "unknown")
    return causes, next((word for word in worst if word in judgements), "right")


def _has_gap(strike: Strike, rows: Sequence[tuple[float, int, int]]) -> bool:
    """Return whether a rank's line about a step is missing, as a full disk has refused it."""
    last: dict[int, tuple[float, int]] = {}
    for t, rank, step in rows:
        before_s, before = last.get(rank, (t, step - 1))
        if step > before + 1 and before_s <= strike.unix_s + strike.lasts_s and t > strike.unix_s:
            return True
        last[rank] = t, step
    return False


def _unexplained(
    strikes: Sequence[Strike], events: Sequence[RunEvent], explained: Sequence[RunEvent]
) -> Iterator[FaultAccount]:
    """Yield ranks that the launcher has named, though no fault had struck them."""
    for event in events:
        struck = event in explained or any(
            event.rank in strike.ranks and strike.unix_s <= event.unix_s for strike in strikes
        )
        if event.kind in DEATHS | {"left"} and not struck:
            strike = Strike(event.unix_s, "none", (event.rank,))
            yield FaultAccount(strike, f"rank {event.rank} {event.text}", "wrong", math.nan)


def _recovery_s(
    strike: Strike, events: Sequence[RunEvent], rows: Sequence[tuple[float, int, int]]
) -> float:
    """Return the seconds from a fault to the end of the next step."""
    after = [row for row in rows if row[0] > strike.unix_s]
    if not strike.ranks:
        return after[0][0] - strike.unix_s if after else math.nan
    epochs_s = (
        event.unix_s
        for event in events
        if event.kind == "epoch"
        and event.unix_s > strike.unix_s
        and not set(event.members) & set(strike.ranks)
    )
    epoch_s = next(epochs_s, math.inf)
    if strike.kind == "newcomer":  # which was not missed
        epoch_s = strike.unix_s
    goes_on_s = strike.unix_s + strike.lasts_s * (strike.kind in {"stop", "partition"})
    is_dead = strike.kind in FATAL
    ends = [
        t
        for t, rank, _ in after
        if t > epoch_s or (not is_dead and rank in strike.ranks and t > goes_on_s)
    ]
    return ends[0] - strike.unix_s if ends else math.nan


def _step_ends(rows: Sequence[tuple[float, int, int]]) -> list[tuple[int, float]]:
    """Return the number of each step, and the time at which the first rank finished it."""
    ends: list[tuple[int, float]] = []
    for t, _, step in rows:
        if not ends or step > ends[-1][0]:
            ends.append((step, t))
    return ends


def _pieces(
    strikes: Sequence[Strike], events: Sequence[RunEvent], begin_s: float, end_s: float
) -> Iterator[_Stretch]:
    """Yield the times of equal numbers of ranks that train, or could train."""
    changes: list[tuple[float, tuple[int, ...] | None, set[int]]] = [
        (e.unix_s, e.members, set()) for e in events if e.kind == "epoch"
    ]
    gone = DEATHS | {"left", "finished"}
    changes += [(e.unix_s, None, {e.rank}) for e in events if e.kind in gone]
    changes += [(s.unix_s, None, set(s.ranks)) for s in strikes if s.kind in FATAL]
    members: set[int] = set()
    dead: set[int] = set()
    at_s = begin_s
    for change_s, epoch, lost in sorted(changes, key=lambda change: change[0]):
        upto_s = min(max(change_s, begin_s), end_s)
        if members and upto_s > at_s:
            yield _Stretch(at_s, upto_s, len(members))
        at_s = max(at_s, upto_s)
        dead |= lost
        members = (members if epoch is None else set(epoch)) - dead
    if members and end_s > at_s:
        yield _Stretch(at_s, end_s, len(members))


def _fault_times(faults: Sequence[FaultAccount]) -> list[tuple[float, float]]:
    """Return the times during which a fault or its recovery lasted."""
    times: list[tuple[float, float]] = []
    for fault in faults:
        lasts_s = fault.recovery_s if math.isfinite(fault.recovery_s) else 0.0
        begin_s = fault.strike.unix_s
        times.append((begin_s, begin_s + max(lasts_s, fault.strike.lasts_s)))
    return times


def _start_times(events: Sequence[RunEvent], end_s: float) -> list[tuple[float, float]]:
    """Return the times during which a process was starting."""
    times: list[tuple[float, float]] = []
    for place, event in enumerate(events):
        if event.kind == "started":
            ends_s = (
                other.unix_s
                for other in events[place:]
                if event.rank in other.members
                or (other.rank == event.rank and other.kind in DEATHS | {"waiting", "ended"})
            )
            times.append((event.unix_s, next(ends_s, end_s)))
    return times


def _rates(
    ends: Sequence[tuple[int, float]],
    pieces: Sequence[_Stretch],
    fault_times: Sequence[tuple[float, float]],
    start_times: Sequence[tuple[float, float]],
) -> dict[int, float]:
    """Return the undisturbed steps per second, by number of ranks."""
    sums: dict[int, dict[int, tuple[int, float]]] = {}  # ranks -> disturbance -> steps, seconds
    for (step, begin_s), (next_step, end_s) in pairwise(ends):
        inside = next((p for p in pieces if p.begin_s <= begin_s and end_s <= p.end_s), None)
        if inside is None:
            continue
        is_struck, is_crowded = (
            any(begin_s < to_s and from_s < end_s for from_s, to_s in times)
            for times in (fault_times, start_times)
        )
        by_disturbance = sums.setdefault(inside.num_ranks, {})
        disturbance = 2 if is_struck else int(is_crowded)
        num_steps, seconds = by_disturbance.get(disturbance, (0, 0.0))
        by_disturbance[disturbance] = num_steps + next_step - step, seconds + end_s - begin_s
    least = {number: values[min(values)] for number, values in sorted(sums.items())}
    return {number: steps / seconds for number, (steps, seconds) in least.items() if seconds}


def _rate(rates: Mapping[int, float], num_ranks: int) -> float:
    """Return the rate of a number of ranks; if unknown, scale the nearest number's rate."""
    if not rates or not num_ranks:
        return 0.0
    nearest = min(rates, key=lambda number: (abs(number - num_ranks), number))
    return rates[nearest] * num_ranks / nearest


def _num_lost(events: Sequence[RunEvent], ends: Sequence[tuple[int, float]]) -> int:
    """Return the number of finished steps after which epochs have gone on from an earlier one."""
    lost = 0
    for event in events:
        if event.kind == "epoch" and event.epoch > 0:
            before = [step for step, t in ends if t <= event.unix_s]
            lost += max(0, before[-1] - event.num_steps) if before else 0
    return lost
