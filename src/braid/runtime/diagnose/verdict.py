"""Determines the rank that made a run fail, from the ends of all ranks.

Problem: when one rank dies, every other rank fails milliseconds later, often with a more prominent
message ("Connection reset by peer"). Launchers that blame the first process that they reap name an
innocent rank: torchrun's "root cause" did so in 11 of 17 measured kills.

Idea: the end of a rank is a *cause* or a *symptom*. Causes are a signal that braid has not sent, an
ordinary exception, an exit code, or a rank declared dead. Symptoms are errors that braid or torch
raise when a peer is lost or late: an error is judged by its type and by the package that raised it,
not by the words of the user's text. The verdict names the first cause in time, and all ranks with
the same error: one bad option fails all ranks. A symptom is blamed only if there is no cause, and
the verdict is then marked as uncertain.

A death that the run survived is kept apart, since the verdict is about the fault that ended the
run. Such a death is the cause only if no cause follows it, and a symptom names its rank.

A connection error raised by the program, or a last line about a connection, is *doubtful*: it is a
cause unless another rank has an undoubted one.


    end                                                | weight
    ---------------------------------------------------+--------------------------------------------
    declared dead while stopped                        | cause
    ended after the launcher's request to stop         | none: not evidence
    killed by the kernel for memory, or by a signal    | cause
    exited with code 0, then named by a PeerLostError  | cause: it left early
    exited with code 0 without leaving its groups      | cause if no other rank has an error
    left its groups, then ended by the launcher        | the same: it took long to exit
    exited with code 0                                 | suspect if there are only symptoms
    error of a lost peer, also in the exception chain  | symptom
    the same, after the rank was stopped for 30 s      | cause if there are only symptoms
    connection error that braid and torch did not raise| doubtful
    any other error, any other exit code               | cause
    survived: the run continued after it               | cause if only symptoms follow that name it;
                                                       | suspect if they follow within 5 s
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from braid.runtime.diagnose.tracebacks import ParsedError, printable

__all__ = [
    "Ending",
    "MemoryKill",
    "RankEnd",
    "Verdict",
    "clause",
    "describe",
    "exit_code",
    "judge",
    "signal_name",
]

TIMEOUT_EXIT_CODE = 124  # as timeout(1)
NOTICED_NS = 5_000_000_000  # the launcher reports a death to other ranks within this time
LONG_PAUSE_S = 30.0  # after this silence other ranks consider a rank lost
SYMPTOM_TYPES = frozenset(
    {
        "PeerLostError", "CommTimeout", "StaleError", "RendezvousError",
        "DistNetworkError", "DistBackendError", "DistStoreError", "KeyboardInterrupt",
    }
)  # fmt: skip
CONNECTION_TYPES = frozenset(
    {"ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError"}
)
LIBRARY_TYPES = re.compile(r"RuntimeError$|(?:gloo|c10|std)::")  # from torch's C++, for any failure
LIBRARY_TEXT = re.compile(  # texts of torch's C++ for a lost or late peer
    r"gloo/|gloo::|Connection (?:reset|closed) by peer|Broken pipe|Socket Timeout|"
    r"Timed out waiting|NCCL (?:communicator was aborted|error: remote)|stopped because rank",
    re.IGNORECASE,
)
PEER_TEXT = re.compile(r"stopped because rank|ended the backward of rank")  # texts of CommError
ABORTED = r"was aborted here: rank \d+: rank "  # of a group whose engine a lost rank has ended
NAMED_TYPE = re.compile(
    rf"\b(?:PeerLostError|CommTimeout|DistNetworkError|DistBackendError)\b|{ABORTED}"
)
PEER_LOST = re.compile(rf"PeerLostError|because rank|{ABORTED}")
CONNECTION_TEXT = re.compile(
    r"Connection (?:reset|closed|refused)|closed by peer|Broken pipe|Timed out", re.IGNORECASE
)
LIBRARIES = frozenset({"braid", "torch"})
NAMED_RANK = re.compile(r"\brank (\d+)\b")


class Ending(Enum):
    """Significance of a rank's end for the run."""

    FINISHED = "finished"
    CAUSE = "cause"
    DOUBTFUL = "doubtful"
    SYMPTOM = "symptom"
    STOPPED_BY_US = "stopped by us"


@dataclass(frozen=True, slots=True)
class MemoryKill:
    """Facts about a process that the kernel killed because memory was exhausted.

    A size is 0 if the kernel does not report it.
    """

    limit_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """End of one rank, from the launcher's observations.

    Attributes:
        rank: Global rank.
        pid: Process id.
        host: Name of the rank's host; empty if all ranks are on the launcher's host.
        ended_ns: Time of the end, on the launcher's clock.
        exit_code: Exit code; None if a signal ended the rank.
        signal: Number of the signal that ended the rank; None if the rank exited.
        unclosed: Whether the rank exited without leaving the groups that it had joined.
        missed: Ranks that had left before, while this rank still needed them.
        departed: Whether the rank had left its groups before the launcher sent it a signal.
        asked_to_stop: Whether the launcher had sent the rank a signal before.
        stopped_s: Seconds of all stops (SIGSTOP), if the rank ended in one; else None.
        stop_signal: Signal that stopped the rank.
        paused_s: Longest time for which the rank had been stopped before it continued, in seconds.
        declared_dead: Whether the launcher killed the rank because it was stopped for too long.
        memory_kill: Facts about the kernel's out-of-memory kill; None if there was none.
        error: Error of the rank, from its control connection or its stderr.
        handled: Whether the program was handling `error` when it called `sys.exit`.
        last_line: Last line of stderr, for programs that print no traceback.
        last_line_s: Seconds between the last line of stderr and the end.
        last_events: Description of the rank's last actions; see `last_events`.
        survived: Whether the run continued without the rank.
    """

    rank: int
    pid: int = 0
    host: str = ""
    ended_ns: int = 0
    exit_code: int | None = None
    signal: int | None = None
    unclosed: bool = False
    missed: tuple[int, ...] = ()
    departed: bool = False
    asked_to_stop: bool = False
    stopped_s: float | None = None
    stop_signal: int = int(signals.SIGSTOP)
    paused_s: float = 0.0
    declared_dead: bool = False
    memory_kill: MemoryKill | None = None
    error: ParsedError | None = None
    handled: bool = False
    last_line: str = ""
    last_line_s: float = 0.0
    last_events: str = ""
    survived: bool = False

    @property
    def ending(self) -> Ending:
        """Significance of this end, regardless of all other ranks."""
        if self.declared_dead:
            return Ending.CAUSE
        if self.asked_to_stop:
            return Ending.STOPPED_BY_US
        if self.exit_code == 0:
            return Ending.FINISHED
        if self.memory_kill is not None:
            return Ending.CAUSE
        if self.signal is not None and self.signal not in {signals.SIGABRT, signals.SIGPIPE}:
            return Ending.CAUSE
        if self.error is not None:
            return _ending_of(self.error)
        if self.signal == signals.SIGPIPE or NAMED_TYPE.search(self.last_line):
            return Ending.SYMPTOM
        return Ending.DOUBTFUL if CONNECTION_TEXT.search(self.last_line) else Ending.CAUSE

    @property
    def names(self) -> frozenset[int]:
        """Other ranks that the error names as lost."""
        if self.error is None:
            return frozenset()
        texts = [str(self.error), *self.error.chain]
        lost = filter(PEER_LOST.search, texts)
        return frozenset(int(r) for text in lost for r in NAMED_RANK.findall(text)) - {self.rank}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Reason for the end of a run.

    Attributes:
        kind: `finished`, `signal`, `memory`, `exception`, `exit`, `mismatch`, `stopped`, `left`,
            `timeout` or `interrupted`.
        cause: Ranks that made the run fail; empty if no rank did. The first rank that failed, then
            ranks with the same error or another side of the same mismatch.
        affected: All other ranks, by rank.
        certain: False if there are only symptoms, so that `cause` is the likeliest rank.
        survived: Earlier ends that the run survived, by time.
    """

    kind: str
    cause: tuple[RankEnd, ...] = ()
    affected: tuple[RankEnd, ...] = ()
    certain: bool = field(default=True)
    survived: tuple[RankEnd, ...] = ()


def judge(ends: Iterable[RankEnd], *, stopped_by: str = "") -> Verdict:
    """Return the verdict on which rank made the run fail.

    Args:
        ends: Ends of all ranks that were started, in any order.
        stopped_by: `timeout` or `interrupted` if the launcher ended the run for that reason before
            any failure; a symptom is then never blamed.

    Returns:
        The verdict; `cause` is empty if every rank finished or was stopped on request.
    """
    by_time = sorted(ends, key=lambda end: (end.ended_ns, end.rank))
    survived = [end for end in by_time if end.survived]
    by_rank = sorted((end for end in by_time if not end.survived), key=lambda end: end.rank)
    kind, cause, certain = _fault(by_rank, survived, stopped_by)
    return Verdict(
        kind=kind,
        cause=tuple(cause),
        affected=tuple(end for end in by_rank if end not in cause),
        certain=certain,
        survived=tuple(end for end in survived if end not in cause),
    )


def exit_code(verdict: Verdict, signum: int) -> int:
    """Return the exit code of a run.

    Args:
        verdict: Reason for the end of the run.
        signum: Number of the signal that interrupted the run; 0 if none.
    """
    if verdict.kind == "timeout":
        return TIMEOUT_EXIT_CODE
    if verdict.kind == "interrupted":
        return 128 + signum
    if not verdict.cause:
        return 0
    cause = verdict.cause[0]
    if verdict.kind in {"exception", "left"}:  # even if a signal then ended the process
        return cause.exit_code or 1
    return 128 + cause.signal if cause.signal else cause.exit_code or 1


def _fault(
    by_rank: Sequence[RankEnd], survived: Sequence[RankEnd], stopped_by: str
) -> tuple[str, list[RankEnd], bool]:
    """Return the kind and the ranks of the fault that ended the run, and whether it is certain."""
    symptoms = [end for end in by_rank if end.ending is Ending.SYMPTOM]
    named = {rank for end in symptoms for rank in end.names}
    causes = [e for e in by_rank if e.ending is Ending.CAUSE or _left_early(e, named, symptoms)]
    doubtful = [end for end in by_rank if end.ending is Ending.DOUBTFUL]
    if all(end.error is None and end.signal is None for end in causes):
        failed_ns = [end.ended_ns for end in (*causes, *doubtful, *symptoms)]
        causes += [
            end
            for end in by_rank
            if end not in causes
            and (end.unclosed and not end.asked_to_stop)
            and end.ended_ns <= max(failed_ns, default=-1)
        ]
    if causes:
        first = min(causes, key=lambda end: end.ended_ns)
        return _kind(first), [e for e in causes if _alike(e, first)], True
    if stopped_by:
        return stopped_by, [], True
    needed = [end for end in survived if end.rank in named]
    if needed:  # the run could not continue without it
        return _kind(needed[-1]), needed[-1:], True
    if doubtful:
        first = min(doubtful, key=lambda end: end.ended_ns)
        blamed = [end for end in doubtful if _alike(end, first)]
        return _kind(first), blamed, len(blamed) == len(doubtful)
    if not symptoms:
        stopped = [end for end in by_rank if end.stopped_s is not None]
        return "stopped" if stopped else "finished", stopped[:1], True
    suspect = _suspect(by_rank, symptoms, named, survived)
    certain = suspect.stopped_s is not None or suspect.paused_s >= LONG_PAUSE_S
    return _kind(suspect), [suspect], certain


def describe(end: RankEnd) -> str:
    """Describe the end of a rank: `killed by signal 9 (SIGKILL)`, `raised ValueError: ...`."""
    if end.stopped_s is not None and end.asked_to_stop:
        lasted = f"{end.stopped_s:.0f} s" if end.stopped_s >= 9.95 else f"{end.stopped_s:.1f} s"
        return f"stopped by {signal_name(end.stop_signal)} for {lasted}, killed by braid"
    if end.memory_kill is not None:
        return f"killed by the kernel for memory{_memory(end.memory_kill)}"
    if _aborted_after(end):
        return printable(f"aborted after {end.error}")
    if end.asked_to_stop and end.departed:
        return "left early, and had not ended when braid ended it"
    if end.signal is not None:
        return f"killed by signal {end.signal} ({signal_name(end.signal)})"
    if end.exit_code == 0:
        return "left early with exit code 0"
    if end.error is not None and not end.handled:
        return printable(f"raised {end.error}")
    code = end.exit_code or 0
    hint = f" (128 + {code - 128}, {signal_name(code - 128)})" if 128 < code < 160 else ""
    context = f" while handling {end.error}" if end.error is not None else ""
    return printable(f"exited with code {code}{hint}{context}")


def clause(end: RankEnd) -> str:
    """Describe the end of a rank as a clause after its name: `was killed by signal 9 (SIGKILL)`."""
    text = describe(end)
    return f"was {text}" if text.startswith(("killed", "stopped")) else text


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL` for 9."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ending_of(error: ParsedError) -> Ending:
    """Return the significance of an error for its rank's end, by its type and origin."""
    if error.type == "MismatchError":
        return Ending.CAUSE
    of_program = error.module.partition(".")[0] not in {"", *LIBRARIES}
    if error.type in SYMPTOM_TYPES and not of_program:
        return Ending.SYMPTOM
    texts = [error.message if of_program else str(error), *error.details, *error.chain]
    if any(map(NAMED_TYPE.search, texts)):
        return Ending.SYMPTOM
    if LIBRARY_TYPES.match(error.type) and any(map(LIBRARY_TEXT.search, texts)):
        return Ending.SYMPTOM
    if error.type == "CommError" and PEER_TEXT.search(error.message):
        return Ending.SYMPTOM
    if error.type in CONNECTION_TYPES:
        return Ending.SYMPTOM if error.raised_by in LIBRARIES else Ending.DOUBTFUL
    return Ending.CAUSE


def _alike(end: RankEnd, first: RankEnd) -> bool:
    """Return whether `end` has the fault of `first`: the same error, or its side of a mismatch.

    Two deaths by the same signal are two faults, and so are two exit codes without a message.
    """
    kind = _kind(first)
    if end is first or _kind(end) != kind or kind not in {"mismatch", "exception", "exit"}:
        return end is first
    return kind == "mismatch" or _error_text(end) == _error_text(first) != ("", ())


def _error_text(end: RankEnd) -> tuple[str, tuple[str, ...]]:
    """Return the message of a rank's failure, without its place."""
    if end.error is not None:
        return str(end.error), end.error.details
    return end.last_line and f"{describe(end)}: {end.last_line}", ()


def _left_early(end: RankEnd, named: set[int], symptoms: Sequence[RankEnd]) -> bool:
    """Return whether a rank that finished was still needed by another rank.

    A leaving rank takes a moment to end, so it may end after the rank that needed it, or so late
    that the launcher ends it.
    """
    was_leaving = end.ending is Ending.STOPPED_BY_US and end.departed
    if not (end.ending is Ending.FINISHED or was_leaving) or end.rank not in named:
        return False
    accusers = [s for s in symptoms if end.rank in s.names]
    return any(s.ended_ns >= end.ended_ns or "has already left" in str(s.error) for s in accusers)


def _suspect(
    by_rank: Sequence[RankEnd],
    symptoms: list[RankEnd],
    named: set[int],
    survived: Sequence[RankEnd],
) -> RankEnd:
    """Return the likeliest cause if there are only symptoms."""
    stopped = [end for end in by_rank if end.stopped_s is not None]
    if stopped:
        return stopped[0]
    paused = [end for end in symptoms if end.paused_s >= LONG_PAUSE_S]
    if paused:
        return max(paused, key=lambda end: end.paused_s)
    first = min(symptoms, key=lambda end: end.ended_ns)
    recent = [end for end in survived if first.ended_ns - end.ended_ns <= NOTICED_NS]
    if recent:  # the last death was one too many
        return recent[-1]
    accused = [end for end in symptoms if end.rank in named and not end.names]
    if accused:
        return min(accused, key=lambda end: end.ended_ns)
    gone = [e for e in by_rank if e.ending is Ending.FINISHED and e.ended_ns <= first.ended_ns]
    return min(gone, key=lambda end: end.ended_ns, default=first)


def _kind(end: RankEnd) -> str:
    if end.stopped_s is not None and end.asked_to_stop:
        return "stopped"
    if end.memory_kill is not None:
        return "memory"
    if end.asked_to_stop and end.departed:
        return "left"
    if end.signal is not None and not _aborted_after(end):
        return "signal"
    if end.exit_code == 0:
        return "left"
    if end.error is None:
        return "exit"
    if end.error.type == "MismatchError":
        return "mismatch"
    return "exit" if end.handled else "exception"


def _aborted_after(end: RankEnd) -> bool:
    """Return whether the rank aborted after an exception, as C++ and torch's threads do."""
    by_abort = end.signal == signals.SIGABRT
    return by_abort and end.error is not None and end.error.type != "Fatal Python error"


def _memory(kill: MemoryKill) -> str:
    parts = []
    if kill.limit_bytes:
        parts.append(f"cgroup limit {kill.limit_bytes / 1e6:.0f} MB")
    if kill.peak_bytes:
        parts.append(f"peak {kill.peak_bytes / 1e6:.0f} MB")
    return f" ({', '.join(parts)})" if parts else ""
