"""Determines the likeliest cause of a hang, and one piece of advice.

The cause for a missing rank is the first line that fits:

    cause      evidence                                       advice
    left       process has ended                              call all operations on all ranks
    stopped    state T                                        kill -CONT
    swapped    pages in swap, major faults                    use less memory
    io         state D                                        check the disk or network
    device     inside the operation, in a wait for the       find the kernel
               rank's own GPU
    data       a DataLoader on the stack, or a `data` span    load faster
    batches    outside of a step, behind the waiting ranks    equal numbers of batches for all ranks
    slow       slower than the waiting ranks all along        balance the work
    busy       a core in use, or wanted                       release the lock, or work less
    phase      inside of a phase, such as `checkpoint`        let all ranks take part
    unseen     no stack                                       look from outside
    elsewhere  none of these                                  look at the line

For ranks that wait for each other, see `deadlock`; for hosts that cannot communicate (`link`), see
`hang_links`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from braid.runtime.diagnose.block import rank_list
from braid.runtime.diagnose.hang_stack import Thread
from braid.runtime.diagnose.hang_view import RankView, SpanView

__all__ = ["Blocked", "Cause", "HangCase", "cause_of", "deadlock", "format_seconds"]

SWAPPED_SHARE = 0.1  # a smaller share of memory in swap does not explain a slow rank
FAULTS_PER_S = 50  # from this rate on, the disk is busy with swapping
BUSY_CORES = 0.8
RUNNABLE_CORES = 0.25  # for a rank that waits for a core
SLOW_FACTOR = 2.0
SLOW_SHARE = 1 / 3  # share of the waiting time that slowness must explain
DATA_PHASES = ("data", "load", "batch")


class Blocked(NamedTuple):
    """A rank that waits for other ranks.

    Attributes:
        view: View of the rank.
        operation: Operation in which the rank waits.
        absent: Members that have not reached the operation.
        presumed: Whether `absent` is a guess, because the members of the group are unknown.
    """

    view: RankView
    operation: SpanView
    absent: frozenset[int]
    presumed: bool = False


class Cause(NamedTuple):
    """Cause of a hang.

    Attributes:
        kind: Kind of the cause, such as `left`, `stopped` or `data`.
        ranks: Ranks with this cause.
        text: Description, as a clause after the ranks.
        advice: Advice to the user.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    advice: str

    def __str__(self) -> str:
        subject = f"{rank_list(self.ranks)} " if self.ranks else ""
        return f"{subject}{self.text}\n-> {self.advice}"


class HangCase(NamedTuple):
    """A missing rank, which has not reached an operation, and the ranks that wait for it.

    Attributes:
        view: View of the missing rank.
        thread: Main thread of the missing rank.
        waiting: Waiting ranks, the longest wait first.
        now_ns: Current time.
    """

    view: RankView
    thread: Thread
    waiting: tuple[Blocked, ...]
    now_ns: int

    @property
    def waited_ns(self) -> int:
        """Duration of the longest wait."""
        return self.now_ns - self.waiting[0].operation.t_ns


def cause_of(case: HangCase) -> Cause:
    """Return the likeliest cause for a missing rank."""
    for kind, fits in _TABLE:
        text = fits(case)
        if text:
            advice = ADVICE[kind].format(pid=case.view.pid)
            return Cause(kind, (case.view.rank,), text, advice)
    raise AssertionError(case)  # the last line of the table always fits


def deadlock(blocked: Sequence[Blocked]) -> Cause:
    """Return the cause of a hang in which each rank waits for another one, so none is missing.

    Args:
        blocked: Waiting ranks, each of which waits for another rank.
    """
    ended = [
        b
        for b in blocked
        if any(other.view.in_step and _has_ended_before(b.view, other.view) for other in blocked)
    ]
    if ended:
        ahead = next(b for b in blocked if b.view.in_step)
        text = f"{_steps_apart(ended[0].view, ahead.view)}, and waits in another operation"
        return Cause("batches", tuple(b.view.rank for b in ended), text, ADVICE["batches"])
    blocked = _cycle(blocked)
    asks = "; ".join(
        f"rank {b.view.rank} in {b.operation.label} for {_awaited(b)}" for b in blocked[:MAX_LISTED]
    )
    kind = "order"
    if all(b.operation.is_call and b.operation.partner is not None for b in blocked):
        kind = "calls"
    elif all(b.operation.is_message for b in blocked):
        kind = "messages"
    elif len({b.operation.group for b in blocked}) > 1:
        kind = "groups"
    return Cause(
        kind, tuple(b.view.rank for b in blocked), f"{WAIT_FOR[kind]}: {asks}", ADVICE[kind]
    )


def _awaited(blocked: Blocked) -> str:
    """Return the ranks that a rank waits for, with "perhaps" or "one of" if they are uncertain."""
    several = blocked.operation.is_message and len(blocked.absent) > 1
    doubt = "perhaps " if blocked.presumed else "one of " if several else ""
    return f"{doubt}{rank_list(blocked.absent)}"


def _cycle(blocked: Sequence[Blocked]) -> list[Blocked]:
    """Return the ranks that are waited for by ranks of the result, sorted by rank."""
    remaining = sorted(blocked, key=lambda b: b.view.rank)
    while True:
        awaited = frozenset[int]().union(*(b.absent for b in remaining))
        kept = [b for b in remaining if b.view.rank in awaited]
        if len(kept) == len(remaining) or not kept:
            return remaining
        remaining = kept


def format_seconds(duration_ns: float) -> str:
    """Format a duration in seconds, such as `10.2 s` or `130 s`."""
    return f"{duration_ns / 1e9:.1f} s" if duration_ns < 99.5e9 else f"{duration_ns / 1e9:.0f} s"


MAX_LISTED = 4
WAIT_FOR: Mapping[str, str] = {
    "order": "wait for each other in different operations",
    "groups": "wait for each other in different groups",
    "messages": "wait for each other's messages",
    "calls": "wait for each other's calls",
}
ADVICE: Mapping[str, str] = {
    "left": "let every rank call the same operations to the end, and leave only then",
    "stopped": "`kill -CONT {pid}` lets it go on; a debugger may hold it",
    "swapped": "use less memory (smaller batches, fewer ranks), or end other programs on this host",
    "io": "check that the disk or the network file system answers (dmesg, df)",
    "device": "find the kernel that does not end: with CUDA_LAUNCH_BLOCKING=1 the next report "
    "names the line that starts it",
    "data": "load faster (more workers, local files); DataLoader(timeout=...) makes a stuck loader "
    "fail",
    "batches": "give every rank the same number of batches (drop the last short one, as "
    "braid.programs.sampling does), or train inside of `with model.join():`",
    "slow": "give it less work, or more cores; see `braid report` for where its time goes",
    "busy": "make the computation shorter, or let all ranks do it; a call that holds the "
    "interpreter's lock also stops braid's threads",
    "phase": "let all ranks take part, or raise --hang-report if the phase is meant to last",
    "unseen": "see its log; `py-spy dump --pid {pid}` or a debugger shows where it is",
    "elsewhere": "look at that line: has the rank run out of batches, taken another branch, or "
    "does it wait for something else?",
    "link": "check the network between them (cable, switch, firewall); ranks end when a host has "
    "been silent for 30 s",
    "inside": "see the stacks in the run's directory; please report this with hang-*.txt",
    "order": "make all ranks call the same operations in the same order",
    "groups": "let all ranks use their groups in the same order",
    "messages": "let one side send before it receives, or use async_op=True",
    "calls": "raise RpcOptions(num_worker_threads=...) if calls call each other more deeply than a "
    "node has threads, or let a function return a future (rpc.functions.async_execution)",
}


def _swapped(case: HangCase) -> str:
    process = case.view.process
    memory = process.swapped_bytes + process.resident_bytes
    faults = process.major_faults_per_s
    if faults < FAULTS_PER_S or process.swapped_bytes < SWAPPED_SHARE * memory:
        return ""
    return f"is swapped out: {process.swapped_bytes / 1e6:,.0f} MB, {faults:.0f} major faults/s"


def _io(case: HangCase) -> str:
    where = f" at {case.thread.place}" if case.thread.place else ""
    return f"is blocked in the kernel (state D){where}" if case.view.process.state == "D" else ""


def _device(case: HangCase) -> str:
    view = case.view
    if not view.waits_for_device:
        return ""
    where = f" at {case.thread.place}" if case.thread.place else ""
    return (
        f"waits for its GPU in {view.operations[-1].label}{where}: work that was queued there "
        "before has not ended"
    )


def _data(case: HangCase) -> str:
    phases = case.view.phases
    inside = bool(phases) and phases[-1].startswith(DATA_PHASES)
    if not (inside or case.thread.loads_data):
        return ""
    ahead = next((b.view for b in case.waiting if b.view.in_step), None)
    behind = ahead is not None and _has_ended_before(case.view, ahead)
    steps = f", {_steps(case.view, ahead)}" if behind and ahead is not None else ""
    slow = _slow(case)
    return f"waits for its data{steps}{f'; it {slow}' if slow else ''}"


def _batches(case: HangCase) -> str:
    view = case.view
    ahead = next((b.view for b in case.waiting if b.view.in_step), None)
    if ahead is not None and not view.phases and _has_ended_before(view, ahead):
        return _steps_apart(view, ahead)
    return "is at the end of its program" if case.thread.is_leaving else ""


def _slow(case: HangCase) -> str:
    first = case.waiting[0]
    own_ns = case.view.own_work_ns(first.operation)
    others_ns = median(b.view.own_work_ns(first.operation) for b in case.waiting)
    if own_ns < SLOW_SHARE * case.waited_ns or own_ns < SLOW_FACTOR * max(others_ns, 1):
        return ""
    times = own_ns / max(others_ns, 1)
    return f"is slow: it works {format_seconds(own_ns)} before each such operation, " + (
        f"{times:.1f} x the other ranks" if times < 100 else "the other ranks next to nothing"
    )


def _busy(case: HangCase) -> str:
    process = case.view.process
    share = process.cpu_share or 0.0
    # a rank that gets a small share of a core computes as well
    wanted = share + process.delayed_share
    if wanted < (RUNNABLE_CORES if process.state == "R" else BUSY_CORES):
        return ""
    where = f" at {case.thread.place}" if case.thread.place else ""
    return f"computes{where} (cpu {100 * share:.0f} %) and has not come back"


def _elsewhere(case: HangCase) -> str:
    place = case.thread.place
    if not place:
        return f"is in {case.thread.frames[0].call}, called by no line of the program"
    if case.thread.call:
        return f"is in {case.thread.call}, called at {place}, not in that operation"
    return f"is at {place}: in a call that has not returned (it may hold the interpreter's lock)"


_TABLE: tuple[tuple[str, Callable[[HangCase], str]], ...] = (
    ("left", lambda c: f"is gone: it {c.view.ended}" if c.view.ended else ""),
    ("stopped", lambda c: "is stopped (state T)" if c.view.process.stopped else ""),
    ("swapped", _swapped),
    ("io", _io),
    ("device", _device),
    ("data", _data),
    ("batches", _batches),
    ("slow", _slow),
    ("busy", _busy),
    ("phase", lambda c: f"is still in {c.view.phases[-1]}" if c.view.phases else ""),
    ("unseen", lambda c: "" if c.thread.frames else "is missing, and gives no stack"),
    ("elsewhere", _elsewhere),
)


def _has_ended_before(view: RankView, ahead: RankView) -> bool:
    """Return whether `view` is outside a step, and its last step precedes the step of `ahead`."""
    if view.step is None or ahead.step is None or view.in_step:
        return False
    return view.step.seq < ahead.step.seq


def _steps(view: RankView, ahead: RankView) -> str:
    assert view.step is not None
    assert ahead.step is not None
    return f"its last step was {view.step.seq}, rank {ahead.rank} is in step {ahead.step.seq}"


def _steps_apart(view: RankView, ahead: RankView) -> str:
    return f"has run out of batches: {_steps(view, ahead)}"
