"""Faults that processes of an elastic training inflict on themselves, chosen by a seed.

The plan of a seed has one or two runs; the launcher is killed at the end of the first of two. A run
has pairs of faults, which strike one pair after another. The first fault of a pair is in a step.
The second one is in the same step, or in the change of members that follows. A fault names no rank,
since new ranks come at any time: it strikes the first process at its point and place. This process
adds a line to the file `struck`. The last member with the state of the training is spared.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from braid import context
from braid.errors import StaleError

NUM_RANKS = 3
NUM_SEEDS = 54  # with at least 500 faults that strike
MOST_SPARED = 2  # faults of a run that may find no process to strike
STEP_POINTS = (
    *("forward", "backward", "sum", "summing", "summed", "update", "updating", "updated"),
    *("save", "saving", "publish", "saved"),
)
CHANGE_POINTS = ("start", "ready", "meet", "met", "state", "send", "receive")
PLACES = {"publish": 0, "start": 1, "receive": 1}  # points that only some processes reach
MOST_VISITS = 12  # of "send" and "receive": a visit for each tensor
MOST_ALARM_S = 0.04
CHANGE_S = 30.0  # longest wait for a new process
FIRST_STEPS = (1, 4, 6, 8, 10, 12)  # of the pairs of a run, which has 24 steps


class Fault(NamedTuple):
    """One fault of a plan.

    Attributes:
        number: Number of the fault in its run; faults 2k and 2k + 1 are a pair.
        point: Point of `elastic_points`, or of the job.
        kind: "kill", "notice" (SIGTERM), "launcher" (the launcher is killed), or "alarm", which
            ends the process a little later.
        place: In a step: place of the process in its group, modulo the size of the group. In a
            change of members: 0 for any process, 1 for a new one.
        first: In a step: number of finished steps from which it strikes. In a change of members:
            number of visits of the process before it strikes.
        delay_s: Seconds until the alarm.
    """

    number: int
    point: str
    kind: str
    place: int
    first: int
    delay_s: float = 0.0

    @property
    def is_in_step(self) -> bool:
        """Whether the fault is in a step, and not in a change of members."""
        return self.point in STEP_POINTS


class Strike(NamedTuple):
    """A fault that has struck.

    Attributes:
        fault: The fault.
        rank: The process.
        num_steps: Number of steps that the process had finished; -1 for a new one.
    """

    fault: Fault
    rank: int
    num_steps: int


def plan(seed: int) -> list[list[Fault]]:
    """Return the faults of each run."""
    rng = random.Random(seed)
    if seed % 6 != 5:
        return [_faults(rng, FIRST_STEPS)]
    first, second = _faults(rng, FIRST_STEPS[:3]), _faults(rng, FIRST_STEPS[-2:])
    killer = rng.randrange(len(first) - 2, len(first))
    first[killer] = first[killer]._replace(kind="launcher")
    return [first, second]


def _faults(rng: random.Random, steps: tuple[int, ...]) -> list[Fault]:
    """Return a pair of faults for each step."""
    faults = []
    for step in steps:
        for is_second in (False, True):
            points = CHANGE_POINTS if is_second and rng.random() < 0.6 else STEP_POINTS
            kinds = ["kill"] * 4 + ["alarm"] + ["notice"] * (not is_second)
            point, kind = rng.choice(points), rng.choice(kinds)
            place, delay_s = rng.randrange(NUM_RANKS), rng.uniform(1e-6, MOST_ALARM_S)
            first = step
            if points == CHANGE_POINTS:
                first = rng.randint(0, MOST_VISITS) if point in {"send", "receive"} else 0
                place = int(place > 0 and point != "send")
            place = PLACES.get(point, place)
            faults.append(Fault(len(faults), point, kind, place, first, delay_s))
    return faults


class Strikes:
    """The faults of a run, on one of its processes.

    Args:
        directory: Directory of the files `plan.json` and `struck`; empty for no faults.

    Attributes:
        training: The training of this process, when it has begun.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        values = json.loads((self.directory / "plan.json").read_text()) if directory else []
        self.faults = [Fault(*value) for value in values]
        self.training: Any = None
        self._visits: Counter[str] = Counter()

    def visit(self, point: str) -> None:
        """Strike if a fault is due at this point."""
        if not self.faults:
            return
        self._visits[point] += 1
        with _locked(self.directory):
            struck = struck_in(self.directory)
            due = [f for f in self._active(struck) if f.point == point and self._is_at(f)]
            fault = next((f for f in due if f.kind == "launcher" or self._may_end(struck)), None)
            if fault is None:
                return
            with (self.directory / "struck").open("a") as file:
                strike = Strike(fault, int(os.environ["RANK"]), self._num_steps)
                file.write(json.dumps(strike) + "\n")
        if fault.kind == "alarm":
            signal.setitimer(signal.ITIMER_REAL, fault.delay_s)
        elif fault.kind == "notice":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            os.kill(os.getppid() if fault.kind == "launcher" else os.getpid(), signal.SIGKILL)

    def wait_for_newcomer(self) -> None:
        """Wait until the members are to change, if a fault needs a new process."""
        deadline_s = time.monotonic() + CHANGE_S
        while self.faults and not self.training._members.pauses:
            with _locked(self.directory):
                struck = struck_in(self.directory)
            members = context.membership()._launcher.epoch.members
            waiting = [f for f in self._active(struck) if not f.is_in_step or len(members) == 1]
            is_broken = bool(_ended(struck).intersection(members))
            if is_broken or not waiting or len(members) == NUM_RANKS:
                return
            assert time.monotonic() < deadline_s, f"no process comes for {waiting}"
            time.sleep(0.01)

    @property
    def _is_member(self) -> bool:
        return self.training is not None and self.training.num_changes >= 0

    @property
    def _num_steps(self) -> int:
        return self.training.num_steps if self._is_member else -1

    def _active(self, struck: list[Strike]) -> list[Fault]:
        """Return the faults that may strike now: of the first pair that has one in a step to come.

        Faults in changes of members come after the fault of their pair, and may come later.
        """
        missing = [f for f in self.faults if f not in {strike.fault for strike in struck}]
        pair = min((f.number // 2 for f in missing if f.is_in_step), default=len(self.faults))
        return [f for f in missing if f.number // 2 < pair + f.is_in_step]

    def _is_at(self, fault: Fault) -> bool:
        if not fault.is_in_step:
            is_there = not (fault.place and self._is_member)
            return is_there and self._visits[fault.point] > fault.first
        if not self._is_member or self._num_steps < fault.first:
            return False
        group = context.world()
        return group.rank == fault.place % group.size

    def _may_end(self, struck: list[Strike]) -> bool:
        """Return whether another member that lives has the state of the training."""
        try:
            epoch = context.membership()._launcher.epoch
        except StaleError:
            return True  # before it has joined the run
        if not self._is_member:
            return True
        newest = max(epoch.num_steps)
        holders = {
            member
            for member, seen in zip(epoch.members, epoch.num_steps, strict=True)
            if seen == newest or self._num_steps > newest
        }
        return bool(holders - _ended(struck) - {int(os.environ["RANK"])})


def struck_in(directory: Path) -> list[Strike]:
    """Return the faults that have struck, in their order."""
    file = directory / "struck"
    lines = file.read_text().splitlines() if file.exists() else []
    return [Strike(Fault(*fault), *rest) for fault, *rest in map(json.loads, lines)]


def _ended(struck: list[Strike]) -> set[int]:
    """Return the ranks that faults have ended, or will end."""
    return {strike.rank for strike in struck if strike.fault.kind != "launcher"}


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / "plan.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
