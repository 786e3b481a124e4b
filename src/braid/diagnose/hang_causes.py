"""Why a rank does not come: the likeliest cause that fits what is seen, and one thing to do about it.

For a rank that others wait for while it waits for nobody, the first line that fits:

    cause      seen                                                         what to do
    left       its process has ended                                        call everything on all ranks
    stopped    state T                                                      kill -CONT
    swapped    pages in swap, major faults                                  less memory
    io         state D                                                      look at the disk or network
    data       a DataLoader on its stack, or inside a `data` span           faster loading
    batches    outside of a step, all of its steps before the others' step  as many batches for each rank
    slow       has needed much longer than the others all along             balance the work
    busy       a core in use, or wanted                                          release the lock, or less work
    phase      inside of a phase, such as `checkpoint`                      let all ranks wait that long
    unseen     no stack                                                     look from outside
    elsewhere  none of these                                                look at the line

For ranks that wait for each other, see `deadlock`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from braid.diagnose.block import rank_list
from braid.diagnose.hang_stack import Thread
from braid.diagnose.hang_view import RankView, SpanView

__all__ = ["Blocked", "Case", "Cause", "cause_of", "deadlock", "of_seconds"]

SWAPPED_SHARE = 0.1  # of its memory; below, something else makes it slow
FAULTS_PER_S = 50  # of a disk that does little else
BUSY_CORES = 0.8
RUNNABLE_CORES = 0.25  # of one that would run if others left it a core
SLOW_FACTOR = 2.0
SLOW_SHARE = 1 / 3  # of the time waited, to be the explanation of it
DATA_PHASES = ("data", "load", "batch")


class Blocked(NamedTuple):
    """A rank that waits for others.

    Attributes:
        view: The rank.
        operation: What it waits in.
        absent: Ranks that have not come to it.
        presumed: Whether they are those of whom it is likely, as it is not on record who takes
            part.
    """

    view: RankView
    operation: SpanView
    absent: frozenset[int]
    presumed: bool = False


class Cause(NamedTuple):
    """Why ranks do not come.

    Attributes:
        kind: First column of the table.
        ranks: Whom it is about.
        text: What is seen, to stand after the ranks.
        advice: What to do.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    advice: str

    def __str__(self) -> str:
        who = f"{rank_list(self.ranks)} " if self.ranks else ""
        return f"{who}{self.text}\n-> {self.advice}"


class Case(NamedTuple):
    """A rank that does not come, and those that wait for it.

    Attributes:
        view: The rank.
        thread: Its main thread.
        waiting: Who waits, the longest first.
        now_ns: Now.
    """

    view: RankView
    thread: Thread
    waiting: tuple[Blocked, ...]
    now_ns: int

    @property
    def waited_ns(self) -> int:
        """How long it has been waited for."""
        return self.now_ns - self.waiting[0].operation.t_ns


def cause_of(case: Case) -> Cause:
    """The likeliest cause."""
    for kind, fits in _TABLE:
        text = fits(case)
        if text:
            advice = ADVICE[kind].format(pid=case.view.pid)
            return Cause(kind, (case.view.rank,), text, advice)
    raise AssertionError(case)  # the last line of the table fits always


def deadlock(blocked: Sequence[Blocked]) -> Cause:
    """What to say of ranks that wait for each other.

    Args:
        blocked: All of them; each waits for another one.
    """
    ended = [b for b in blocked if _is_behind(b.view, blocked)]
    if ended:
        ahead = next(b for b in blocked if b.view.in_step)
        text = f"{_steps_apart(ended[0].view, ahead.view)}, and waits in another operation"
        return Cause("batches", tuple(b.view.rank for b in ended), text, ADVICE["batches"])
    blocked = _cycle(blocked)
    asks = "; ".join(
        f"rank {b.view.rank} in {b.operation.label} for {_whom(b)}" for b in blocked[:MAX_ASKED]
    )
    kind = "order"
    if all(b.operation.is_message for b in blocked):
        kind = "messages"
    elif len({b.operation.group for b in blocked}) > 1:
        kind = "groups"
    return Cause(
        kind, tuple(b.view.rank for b in blocked), f"{WAIT_FOR[kind]}: {asks}", ADVICE[kind]
    )


def _whom(blocked: Blocked) -> str:
    """The ranks that it waits for; it is not on record from which of them a message should come."""
    several = blocked.operation.is_message and len(blocked.absent) > 1
    doubt = "perhaps " if blocked.presumed else "one of " if several else ""
    return f"{doubt}{rank_list(blocked.absent)}"


def _cycle(blocked: Sequence[Blocked]) -> list[Blocked]:
    """Without those that wait while nobody waits for them; by rank."""
    left = sorted(blocked, key=lambda b: b.view.rank)
    while True:
        awaited = frozenset[int]().union(*(b.absent for b in left))
        kept = [b for b in left if b.view.rank in awaited]
        if len(kept) == len(left) or not kept:
            return left
        left = kept


def of_seconds(duration_ns: float) -> str:
    """`10.2 s`, `130 s`."""
    return f"{duration_ns / 1e9:.1f} s" if duration_ns < 99.5e9 else f"{duration_ns / 1e9:.0f} s"


MAX_ASKED = 4
WAIT_FOR: Mapping[str, str] = {
    "order": "wait for each other in different operations",
    "groups": "wait for each other in different groups",
    "messages": "wait for each other's messages",
}
ADVICE: Mapping[str, str] = {
    "left": "let every rank call the same operations to the end, and leave only then",
    "stopped": "`kill -CONT {pid}` lets it go on; a debugger may hold it",
    "swapped": "use less memory (smaller batches, fewer ranks), or end what else fills this host",
    "io": "see whether the disk or the network file system answers (dmesg, df)",
    "data": "load faster (more workers, local files); DataLoader(timeout=...) makes a stuck one "
    "fail",
    "batches": "give every rank as many batches (drop the last short one, braid.sampling)",
    "slow": "give it less work, or more cores; see `braid report` for where its time goes",
    "busy": "make it shorter, or let all ranks do it; a call that holds the interpreter's lock "
    "stops braid's threads, too",
    "phase": "let all ranks take part, or raise --hang-report if it is meant to last",
    "unseen": "see its log; `py-spy dump --pid {pid}` or a debugger shows where it is",
    "elsewhere": "look at that line: has it run out of batches, taken another branch, or does it "
    "wait for something else?",
    "inside": "see the stacks in the run's directory; please report this with hang-*.txt",
    "order": "make all ranks call the same operations in the same order",
    "groups": "let all ranks use their groups in the same order",
    "messages": "let one side send before it receives, or use async_op=True",
}


def _left(case: Case) -> str:
    return f"is gone: it {case.view.ended}" if case.view.ended else ""


def _stopped(case: Case) -> str:
    return "is stopped (state T)" if case.view.process.stopped else ""


def _swapped(case: Case) -> str:
    process = case.view.process
    memory = process.swapped_bytes + process.resident_bytes
    faults = process.major_faults_per_s
    if faults < FAULTS_PER_S or process.swapped_bytes < SWAPPED_SHARE * memory:
        return ""
    return (
        f"is swapped out: {process.swapped_bytes / 1e6:,.0f} MB of it, {faults:.0f} major faults/s"
    )


def _io(case: Case) -> str:
    where = f" at {case.thread.place}" if case.thread.place else ""
    return f"is blocked in the kernel (state D){where}" if case.view.process.state == "D" else ""


def _data(case: Case) -> str:
    phases = case.view.phases
    inside = bool(phases) and phases[-1].startswith(DATA_PHASES)
    if not (inside or case.thread.loads_data):
        return ""
    ahead = next((b.view for b in case.waiting if b.view.in_step), None)
    behind = ahead is not None and _has_ended_before(case.view, ahead)
    steps = f", {_steps(case.view, ahead)}" if behind and ahead is not None else ""
    slow = _slow(case)
    return f"waits for its data{steps}{f'; it {slow}' if slow else ''}"


def _batches(case: Case) -> str:
    view = case.view
    ahead = next((b.view for b in case.waiting if b.view.in_step), None)
    if ahead is not None and not view.phases and _has_ended_before(view, ahead):
        return _steps_apart(view, ahead)
    return "is at the end of its program" if case.thread.is_leaving else ""


def _slow(case: Case) -> str:
    first = case.waiting[0]
    own_ns = case.view.own_work_ns(first.operation)
    others_ns = median(b.view.own_work_ns(first.operation) for b in case.waiting)
    if own_ns < SLOW_SHARE * case.waited_ns or own_ns < SLOW_FACTOR * max(others_ns, 1):
        return ""
    times = own_ns / max(others_ns, 1)
    return f"is slow: {of_seconds(own_ns)} of its own before each such operation, " + (
        f"{times:.1f} x the others" if times < 100 else "the others next to nothing"
    )


def _busy(case: Case) -> str:
    share = case.view.process.cpu_share or 0.0
    if share < (RUNNABLE_CORES if case.view.process.state == "R" else BUSY_CORES):
        return ""
    where = f" at {case.thread.place}" if case.thread.place else ""
    return f"computes{where} (cpu {100 * share:.0f} %) and has not come back"


def _phase(case: Case) -> str:
    phases = case.view.phases
    return f"is still in {phases[-1]}" if phases else ""


def _unseen(case: Case) -> str:
    return "" if case.thread.frames else "does not come, and gives no stack"


def _elsewhere(case: Case) -> str:
    place = case.thread.place
    if not place:
        return f"is in {case.thread.frames[0].call}, called by no line of the program"
    if case.thread.call:
        return f"is in {case.thread.call}, called at {place}, not on its way"
    return f"is at {place}: in a call that has not returned (it may hold the interpreter's lock)"


_TABLE: tuple[tuple[str, Callable[[Case], str]], ...] = (
    ("left", _left),
    ("stopped", _stopped),
    ("swapped", _swapped),
    ("io", _io),
    ("data", _data),
    ("batches", _batches),
    ("slow", _slow),
    ("busy", _busy),
    ("phase", _phase),
    ("unseen", _unseen),
    ("elsewhere", _elsewhere),
)


def _is_behind(view: RankView, blocked: Sequence[Blocked]) -> bool:
    return any(b.view.in_step and _has_ended_before(view, b.view) for b in blocked)


def _has_ended_before(view: RankView, ahead: RankView) -> bool:
    """Whether `view` is outside of a step and all of its steps came before the one that `ahead` is in."""
    if view.step is None or ahead.step is None or view.in_step:
        return False
    return view.step.seq < ahead.step.seq


def _steps(view: RankView, ahead: RankView) -> str:
    assert view.step is not None
    assert ahead.step is not None
    return f"its last step was {view.step.seq}, rank {ahead.rank} is in step {ahead.step.seq}"


def _steps_apart(view: RankView, ahead: RankView) -> str:
    return f"has run out of batches: {_steps(view, ahead)}"
