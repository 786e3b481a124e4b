"""Plans faults from a seed: the time, the kind and the choice of the rank.

Each kind occurs once before any kind occurs again, so a short plan contains all kinds. The ranks at
the time of a fault are not known in advance, so a plan contains random numbers that choose a rank.

    kill       SIGKILL to a member                          the others go on without it
    two        SIGKILL to two members simultaneously        the same
    newcomer   SIGKILL to a process that is about to join   another process takes its place
    leave      SIGTERM to a member: a notice of preemption  it leaves after its step
    stop       SIGSTOP to a member, later SIGCONT           the others wait, or it is replaced
    slow       SIGSTOP and SIGCONT in turns                 the same
    bitflip    a bit of each gradient of a member flips     verify= finds the rank, which leaves
    disk       the run directory's file system is full      the run goes on without its logs
    partition  a host of several has no network for a while the others wait for it
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR2
from typing import NamedTuple

__all__ = ["KINDS", "Fault", "Signal", "choose_host", "choose_ranks", "plan_faults", "signals_of"]

KINDS = ("kill", "stop", "slow", "leave", "newcomer", "two", "bitflip", "disk", "partition")
SLOW_S = 0.2  # seconds for which a slow rank is stopped, and then goes on
NEWCOMER_S = 0.5  # less than a newcomer needs to become a member


class Fault(NamedTuple):
    """A planned fault, such as the death of a rank.

    Attributes:
        at_s: Seconds after the first step of the run.
        kind: One of `KINDS`.
        draw: Number in [0, 1) that chooses the rank.
        lasts_s: Seconds until a stopped rank goes on, or a host is connected again; delay of the
            strike for a newcomer.
    """

    at_s: float
    kind: str
    draw: float
    lasts_s: float


class Signal(NamedTuple):
    """A signal to a rank, some seconds after the fault began."""

    after_s: float
    rank: int
    signum: int


def plan_faults(
    seed: int, kinds: Sequence[str], every_s: float, duration_s: float
) -> tuple[Fault, ...]:
    """Return the faults of a run, in the order of their times.

    Args:
        seed: Seed of all choices.
        kinds: Kinds to choose from.
        every_s: Mean time between two faults.
        duration_s: Time before which the last fault happens.

    >>> [fault.kind for fault in plan_faults(0, ["kill", "stop"], 10.0, 45.0)]
    ['stop', 'kill', 'stop', 'kill']
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    hand: list[str] = []
    while True:
        at_s = every_s * (len(faults) + rng.uniform(0.75, 1.25))
        if at_s >= duration_s or not kinds:
            return tuple(faults)
        if not hand:
            hand = rng.sample(kinds, len(kinds))
        kind = hand.pop()
        longest_s = NEWCOMER_S if kind == "newcomer" else every_s / 2
        faults.append(Fault(at_s, kind, rng.random(), rng.uniform(0.1, 1.0) * longest_s))


def choose_ranks(fault: Fault, members: Sequence[int], newcomers: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks that a fault strikes; empty if none can be struck now.

    The last member is spared, because the state of the training would be lost with it. A `bitflip`
    needs three members (on a mesh, three replicas): with two, no comparison shows which one
    computes wrongly.

    Args:
        fault: The fault.
        members: Ranks that train and are not under another fault.
        newcomers: Ranks that have started and do not train yet.

    >>> choose_ranks(Fault(0.0, "two", 0.9, 0.0), (0, 2, 3), ())
    (3, 0)
    """
    pool = sorted(newcomers if fault.kind == "newcomer" else members)
    count = 2 if fault.kind == "two" else 1
    spared = {"newcomer": 0, "stop": 0, "slow": 0, "bitflip": 2}.get(fault.kind, 1)
    if len(pool) < count + spared:
        return ()
    first = int(fault.draw * len(pool))
    return tuple(pool[(first + place) % len(pool)] for place in range(count))


def choose_host(fault: Fault, members: Mapping[str, Sequence[int]]) -> str:
    """Return the host that a `partition` cuts off; empty if none can be cut off now.

    Args:
        fault: The fault.
        members: Ranks that train, by host; of the hosts that may be cut off.

    >>> choose_host(Fault(0.0, "partition", 0.9, 1.0), {"b": [1], "c": [2], "d": []})
    'c'
    """
    pool = sorted(host for host, ranks in members.items() if ranks)
    return pool[int(fault.draw * len(pool))] if pool else ""


def signals_of(fault: Fault, ranks: Sequence[int]) -> tuple[Signal, ...]:
    """Return the signals of a fault to the ranks that it strikes."""
    if fault.kind in {"kill", "two"}:
        return tuple(Signal(0.0, rank, SIGKILL) for rank in ranks)
    (rank,) = ranks
    if fault.kind == "newcomer":
        return (Signal(fault.lasts_s, rank, SIGKILL),)
    if fault.kind == "leave":
        return (Signal(0.0, rank, SIGTERM),)
    if fault.kind == "stop":
        return (Signal(0.0, rank, SIGSTOP), Signal(fault.lasts_s, rank, SIGCONT))
    if fault.kind == "bitflip":
        return (Signal(0.0, rank, SIGUSR2), Signal(fault.lasts_s, rank, SIGUSR2))
    signals: list[Signal] = []
    for turn in range(max(1, round(fault.lasts_s / (2 * SLOW_S)))):
        begin_s = 2 * SLOW_S * turn
        signals += [Signal(begin_s, rank, SIGSTOP), Signal(begin_s + SLOW_S, rank, SIGCONT)]
    return tuple(signals)
