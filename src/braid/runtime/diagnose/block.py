"""Formats the error block, the last lines that a failed run prints.

Problem: N ranks print N interleaved tracebacks, and the launcher adds another. The relevant one has
scrolled away.

Idea: print one block after all other output, always with the same labels in the same order, so that
users and programs find the cause quickly. `survived` lists earlier deaths after which the run
continued. `note` appears in a run that finished although a rank left early.

    braid: run stopped at step 213 after 41 s (exit 1)
      cause    rank 1 on host b (pid 812): ValueError: shard-7 is missing      train.py:57 in load
      affected ranks 0,2,3 were waiting in all_reduce(...)#426 called at train.py:41 - ...
      saved    checkpoint step 200 (sha256 ok), 13 steps not saved
      resume   braid run --resume auto -n 4 train.py
      logs     ./runs/2026-11-20_a3f/rank1.log   timeline: braid report ./runs/2026-11-20_a3f
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable
from dataclasses import dataclass, replace

from braid.runtime.diagnose.tracebacks import printable
from braid.runtime.diagnose.verdict import Ending, RankEnd, Verdict, describe, signal_name

__all__ = ["SavedCheckpoint", "StopReport", "error_block", "rank_list", "render_block"]

LABEL_WIDTH = 9
WHERE_GAP = "      "
LEFT_EARLY = (
    (
        "-> if it had fewer batches than the others: train inside of `with model.join():` "
        "(braid.DistributedDataParallel.join)"
    ),
    "-> if it is a node of remote calls: call rpc.shutdown() at its end",
)
NO_TERMINAL = "-> to read the terminal in one rank, start with `braid run --stdin {rank}`"
READERS = frozenset({"BdbQuit", "EOFError"})  # a prompt without a terminal ends with these
OLD_LINE_S = 1.0  # an older line of stderr may be unrelated to the end
OF_ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b")  # a traceback that is not the cause
STATUS = {"finished": "finished", "interrupted": "interrupted", "timeout": "timed out"}


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """The last complete checkpoint of a run.

    Attributes:
        step: Step of the checkpoint.
        path: Path of the checkpoint.
        sha256_ok: Whether its checksums have been verified.
        is_earlier: Whether an earlier run saved it, and this run loaded it.
    """

    step: int
    path: str
    sha256_ok: bool
    is_earlier: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StopReport:
    """Data of the error block; part of the record of a run.

    Attributes:
        verdict: Verdict on which rank made the run fail.
        exit_code: Exit code of the run.
        elapsed_s: Duration of the run in seconds.
        step: Last step that any rank began; None if unknown.
        saved: Last complete checkpoint; None if there is none.
        resume: Command that continues the run from the checkpoint.
        log_dir: Directory of logs, as the user wrote it; empty if there is none.
        has_timeline: Whether events were recorded, so that a timeline can be drawn.
        limit_s: Time limit in seconds, for a verdict of kind `timeout`.
        links: Hosts that cannot communicate, as text, if no rank is known to be the cause.
    """

    verdict: Verdict
    exit_code: int
    elapsed_s: float
    step: int | None = None
    saved: SavedCheckpoint | None = None
    resume: str = ""
    log_dir: str = ""
    has_timeline: bool = False
    limit_s: float | None = None
    links: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every rank has finished."""
        return self.exit_code == 0

    @property
    def status(self) -> str:
        """Status of the run: `finished`, `stopped`, `interrupted` or `timed out`."""
        return STATUS.get(self.verdict.kind, "stopped")


def error_block(report: StopReport) -> list[tuple[str, str]]:
    """Return the rows of a run's error block as (label, text).

    The first label is `braid:`; the label of a continuation is empty.
    """
    rows = [("braid:", _headline(report))]
    if report.links:
        ends = (*report.verdict.cause, *report.verdict.affected)
        affected = tuple(sorted(ends, key=lambda end: end.rank))
        report = replace(report, verdict=replace(report.verdict, cause=(), affected=affected))
    rows += _labelled("cause", list(report.links) or _cause(report.verdict))
    rows += _labelled(
        "survived", [_survived(end, report.verdict) for end in report.verdict.survived]
    )
    if report.ok:
        rows += _labelled("note", _left_early(report.verdict))
    else:
        rows += _labelled("affected", _affected(report.verdict))
    if report.saved is not None:
        rows.append(("saved", _saved(report.saved, report.step)))
        if report.resume and not report.ok:
            rows.append(("resume", report.resume))
    if report.log_dir:
        rows.append(("logs", _logs(report)))
    return rows


def render_block(rows: Iterable[tuple[str, str]]) -> str:
    """Format rows as text; further lines of a row are aligned with its first line."""
    lines = []
    for label, text in rows:
        first, *rest = printable(text).split("\n")
        if label == "braid:":
            lines.append(f"braid: {first}")
        else:
            lines.append(f"  {label:<{LABEL_WIDTH}}{first}".rstrip())
        lines += [f"  {'':<{LABEL_WIDTH}}{line}".rstrip() for line in rest]
    return "\n".join(lines)


def rank_list(ranks: Iterable[int]) -> str:
    """Format ranks as `rank 1`, `ranks 0,2,3` or `ranks 0-15`; runs of four are abbreviated."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{r[0]}-{r[-1]}" if len(r) > 3 else ",".join(map(str, r)) for r in runs]
    return f"rank{'s' if len(ordered) > 1 else ''} {','.join(parts)}"


def _headline(report: StopReport) -> str:
    text = f"run {report.status}"
    if report.step is not None:
        text += f" at step {report.step}"
    text += f" after {_seconds(report.elapsed_s)}"
    if report.verdict.kind == "timeout" and report.limit_s is not None:
        text += f" (limit {_seconds(report.limit_s)}, exit {report.exit_code})"
        return text
    return f"{text} (exit {report.exit_code})"


def _cause(verdict: Verdict) -> list[str]:
    if not verdict.cause:
        return []
    ends = verdict.cause
    first = ends[0]
    ranks = rank_list(end.rank for end in ends)
    if len(ends) == 1:
        host = f" on host {first.host}" if first.host else ""
        ranks += f"{host} (pid {first.pid})"
    what = describe(first).removeprefix("raised ")
    where = first.error.where if first.error is not None else ""
    paused = _paused(first)
    line = f"{ranks}{paused and f', which {paused}'}: {what}"
    if where:
        line += f"{WHERE_GAP}{where}"
    elif first.last_events:  # continues `killed by signal 9`, but is set apart from a message
        line += f"{WHERE_GAP if first.error is not None else ' '}{first.last_events}"
    lines = [line, *(first.error.details if first.error is not None else ())]
    if first.error is None or (first.handled and first.error.message not in first.last_line):
        lines.append(_last_line(first))
    lines = [text for text in lines if text]
    if verdict.kind == "left":
        lines += LEFT_EARLY
    if first.error is not None and first.error.type in READERS:
        lines.append(NO_TERMINAL.format(rank=first.rank))
    if not verdict.certain:
        lines.append("uncertain: every rank failed because of another one; this is the likeliest")
    return ["\n".join(lines)]


def _survived(end: RankEnd, verdict: Verdict) -> str:
    """Return the line for an earlier end that the run survived."""
    host = f" on host {end.host}" if end.host else ""
    doing = f" {end.last_events}" if end.last_events else ""
    before = ""
    if verdict.cause:
        before = f", {_seconds((verdict.cause[0].ended_ns - end.ended_ns) / 1e9)} before"
    return f"rank {end.rank}{host} (pid {end.pid}){before}: {describe(end)}{doing}"


def _left_early(verdict: Verdict) -> list[str]:
    """Return the ranks of a finished run that left while other ranks still needed them."""
    missing: dict[int, list[int]] = {}
    for end in verdict.affected:
        for rank in end.missed:
            missing.setdefault(rank, []).append(end.rank)
    return [
        f"rank {rank} left early: an operation of {rank_list(ranks)} failed, and was given up"
        for rank, ranks in sorted(missing.items())
    ]


def _last_line(end: RankEnd) -> str:
    """Return the rank's last line on stderr, marked as such if it may be unrelated."""
    if end.last_line and end.last_line_s >= OLD_LINE_S:
        return f"last on stderr, {_seconds(end.last_line_s)} before: {end.last_line}"
    return f"last on stderr: {end.last_line}" if OF_ERROR.match(end.last_line) else end.last_line


def _affected(verdict: Verdict) -> list[str]:
    """Return one line for each set of ranks with the same last events and the same end."""
    groups: dict[tuple[str, str], list[int]] = {}
    for end in verdict.affected:
        ending = ", ".join(filter(None, (_how_it_ended(end), _paused(end))))
        groups.setdefault((_doing(end), ending), []).append(end.rank)
    lines = []
    for (doing, ending), ranks in groups.items():
        subject = rank_list(ranks)
        were = "was" if len(ranks) == 1 else "were"
        lines.append(f"{subject} {were} {doing} - {ending}" if doing else f"{subject} {ending}")
    silent = [end.rank for end in verdict.affected if end.asked_to_stop and not _doing(end)]
    if verdict.kind == "timeout" and silent:
        lines.append(f"no stack of {rank_list(silent)}: stacks need braid.init() in the program")
    return lines


def _doing(end: RankEnd) -> str:
    """Return the last events of the rank, or else the source line of its error."""
    if end.last_events or end.error is None or not end.error.where:
        return end.last_events
    return f"at {end.error.where}"


def _how_it_ended(end: RankEnd) -> str:
    if end.stopped_s is not None:
        return describe(end)
    ending = end.ending
    if ending is Ending.FINISHED:
        return "finished"
    if ending in {Ending.CAUSE, Ending.DOUBTFUL}:
        return f"also failed: {describe(end)}"
    if ending is Ending.STOPPED_BY_US and end.signal == signals.SIGKILL:
        return "did not stop when asked, killed by braid"
    if ending is Ending.STOPPED_BY_US and end.signal is not None:
        return f"ended by braid ({signal_name(end.signal)})"
    return "stopped cleanly"


def _paused(end: RankEnd) -> str:
    """Return for how long a rank was stopped before it continued."""
    if not end.paused_s:
        return ""
    return f"had been stopped by {signal_name(end.stop_signal)} for {_seconds(end.paused_s)}"


def _saved(saved: SavedCheckpoint, step: int | None) -> str:
    of_run = " of an earlier run" * saved.is_earlier
    checked = "ok" if saved.sha256_ok else "not checked"
    text = f"checkpoint step {saved.step}{of_run} (sha256 {checked})"
    if step is not None and step > saved.step:
        lost = step - saved.step
        text += f", {lost} step{'s' if lost > 1 else ''} not saved"
    return text


def _logs(report: StopReport) -> str:
    ends = report.verdict.cause or report.verdict.affected
    text = f"{report.log_dir}/rank{ends[0].rank}.log" if len(ends) == 1 else f"{report.log_dir}/"
    if report.has_timeline:
        text += f"   timeline: braid report {report.log_dir}"
    return text


def _labelled(label: str, texts: list[str]) -> list[tuple[str, str]]:
    return [(label if i == 0 else "", text) for i, text in enumerate(texts)]


def _seconds(duration_s: float) -> str:
    return f"{duration_s:.1f} s" if duration_s < 10 else f"{duration_s:.0f} s"
