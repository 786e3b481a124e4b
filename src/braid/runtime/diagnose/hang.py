"""Determines which ranks of a job hang, in which operations, and which ranks they wait for.

Problem: when one rank does not reach a collective, all other ranks wait silently for minutes, until
a deadline. The stack that the user then sees belongs to an innocent rank. Existing tools (torch's
flight recorder, `py-spy dump`) show the stacks of all ranks, to be compared by eye.

Idea: build the wait-for graph. An edge goes from each waiting rank to each member of its operation
that has not reached the operation. A rank at the end of an edge that does not wait is *missing*. If
there is none, the graph has a cycle: the ranks wait for each other.

    waits      rank 0 --all_reduce#176--> rank 1        rank 0 --barrier#3 of group a--> rank 1
    reached    rank 1: in a DataLoader                  rank 1 --barrier#9 of group b--> rank 0
    verdict    rank 1 is missing                        no rank is missing: a cycle

    braid: no progress for 10.2 s at step 88
      waiting  ranks 0,2,3  all_reduce#176  float32[4096], sum   train.py:41 in step
      missing  rank 1 (pid 812)   in DataLoader.__next__  train.py:38 in main   cpu 0 %, sleeping
               last seen 10.1 s ago, as it ended all_reduce#175  train.py:41 in step, after step 87
      likely   rank 1 waits for its data
               -> load faster (more workers, local files); DataLoader(timeout=...) makes a stuck
                  loader fail

A rank that waits is never named as missing.

The members of a group are known from its earlier operations. In the first operation of a group, a
rank that waits in another group is presumed to be a member. This also detects ranks that use two
new groups in different orders.

Source: E. G. Coffman et al., System Deadlocks, ACM Computing Surveys 3(2), 1971 (wait-for graphs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from braid.runtime.diagnose.block import rank_list, render_block
from braid.runtime.diagnose.hang_causes import (
    ADVICE,
    Blocked,
    Cause,
    HangCase,
    cause_of,
    deadlock,
    format_seconds,
)
from braid.runtime.diagnose.hang_links import broken_links
from braid.runtime.diagnose.hang_view import Process, RankView, SpanView
from braid.runtime.diagnose.tracebacks import short_site

__all__ = ["HangReport", "Process", "RankView", "SpanView", "find_hang"]

MAX_ROWS = 6  # per label, so that the report for a thousand ranks fits on a screen
BUSY_CORES = 0.5  # a rank in a collective that uses more is moving data
STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "ended",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HangReport:
    """Report of a hang; its `str` is the block of text for the user.

    Attributes:
        age_ns: Duration of the longest wait.
        step: Step of the waiting ranks; None if they have not recorded any.
        waiting: Waiting ranks, and the operations in which they wait.
        missing: Ranks that are waited for, and where they are; empty if ranks wait for each other.
        causes: Likeliest causes.
        certain: Whether the missing ranks are known to be members of the group.
    """

    age_ns: int
    step: int | None
    waiting: tuple[tuple[tuple[int, ...], str], ...]
    missing: tuple[tuple[int, str], ...]
    causes: tuple[Cause, ...]
    certain: bool = True

    @property
    def waiting_ranks(self) -> tuple[int, ...]:
        """Ranks that wait."""
        return tuple(sorted(rank for ranks, _ in self.waiting for rank in ranks))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that are waited for and do not wait themselves."""
        return tuple(rank for rank, _ in self.missing)

    def __str__(self) -> str:
        at = f" at step {self.step}" if self.step is not None else ""
        rows = [("braid:", f"no progress for {format_seconds(self.age_ns)}{at}")]
        rows += _labelled("waiting", [f"{rank_list(rs)}  {text}" for rs, text in self.waiting])
        shown = [text for _, text in self.missing[:MAX_ROWS]]
        if len(self.missing) > MAX_ROWS:
            shown.append(f"and {rank_list(self.missing_ranks[MAX_ROWS:])}")
        rows += _labelled("missing", shown)
        if self.missing and not self.certain:
            rows.append(("", "perhaps: the members of that group are not all known yet"))
        rows += _labelled("likely", [str(cause) for cause in self.causes])
        return render_block(rows)


def find_hang(
    views: Sequence[RankView],
    *,
    now_ns: int,
    limit_ns: int,
    hosts: Mapping[str, str] | None = None,
) -> HangReport | None:
    """Determine which ranks hang, and which ranks they wait for.

    Args:
        views: Views of all ranks of the job, including those that have ended.
        now_ns: Current time on the clock of the spans.
        limit_ns: Shortest wait of a rank that is reported.
        hosts: Names of the hosts by address, for connections between them.

    Returns:
        The report; None if no rank waits that long, or if data still moves.
    """
    by_rank = {view.rank: view for view in views}
    waiting = _with_presumed({v.rank: _blocked(v, views) for v in views if v.waits}, views)
    stalled = [b for b in waiting.values() if now_ns - b.operation.t_ns >= limit_ns]
    if not stalled:
        return None
    involved, missing = _reached(stalled, waiting)
    certain = not any(b.presumed or _is_guess(b, views) for b in involved)
    if not missing and not any(b.absent for b in involved):
        missing = _inside(involved, views)
        if not missing:
            missing, certain = _strangers(involved, views), False
    involved.sort(key=lambda b: b.operation.t_ns)
    links = [
        Cause("link", (), text, ADVICE["link"])
        for text, _ in broken_links(views, hosts or {}, now_ns=now_ns)
    ]
    if links:  # the state of ranks on an unreachable host is unknown
        missing = {r for r in missing if r in by_rank and (by_rank[r].ended or by_rank[r].stack)}
    elif not missing and (_moves(involved) or _new_calls(involved, now_ns - limit_ns)):
        return None
    elif missing and _serves(
        involved, [by_rank[rank] for rank in missing if rank in by_rank], now_ns - limit_ns
    ):
        return None  # a long computation is not a hang
    cases = [
        HangCase(by_rank[rank], by_rank[rank].thread, tuple(involved), now_ns)
        for rank in sorted(missing)
        if rank in by_rank
    ]
    steps = [b.view.step.seq for b in involved if b.view.step is not None]
    return HangReport(
        age_ns=now_ns - involved[0].operation.t_ns,
        step=max(steps, default=None),
        waiting=_waiting_rows(involved, views),
        missing=tuple((case.view.rank, _missing_row(case)) for case in cases),
        causes=(*links, *_causes(cases)) if cases or links else (_without_missing(involved),),
        certain=certain,
    )


def _blocked(view: RankView, views: Sequence[RankView]) -> Blocked:
    """Return the open operation in which `view` waits: the first one with absent members."""
    candidates = [Blocked(view, op, _absent(view, op, views)) for op in view.operations]
    return next((b for b in candidates if b.absent), candidates[-1])


def _absent(view: RankView, operation: SpanView, views: Sequence[RankView]) -> frozenset[int]:
    others = [v for v in views if v.rank != view.rank]
    if operation.is_call:  # the answer is missing, whatever else the callee does
        return frozenset(v.rank for v in others if v.rank in operation.asked)
    if operation.partner is not None:
        others = [v for v in others if v.rank == operation.partner]
    else:
        others = [v for v in others if v.is_known_in(operation.group)]
    if operation.is_message:
        return frozenset(v.rank for v in others if not v.exchanges(operation, view.rank))
    return frozenset(v.rank for v in others if not v.has_reached(operation))


def _with_presumed(
    waiting: Mapping[int, Blocked], views: Sequence[RankView]
) -> Mapping[int, Blocked]:
    """Add presumed edges: from the first operation of a group to ranks that wait in another one."""
    if len(waiting) < len(views):  # a rank that does not wait is likelier; see `_strangers`
        return waiting
    new = {r: b for r, b in waiting.items() if not b.absent and _is_first(b.operation, views)}
    presumed = dict(waiting)
    for rank, b in new.items():
        strangers = {v.rank for v in views if not v.is_known_in(b.operation.group)}
        likeliest = (strangers & new.keys()) or strangers
        if likeliest and not _is_busy(b):
            # of two ranks, the other one is certainly a member: one rank alone does not wait
            presumed[rank] = b._replace(absent=frozenset(likeliest), presumed=len(views) > 2)
    return presumed


def _is_first(operation: SpanView, views: Sequence[RankView]) -> bool:
    """Return whether no operation of the group has ended yet, so that members may be unknown."""
    spans = (span for view in views for span in view.spans)
    return not operation.is_message and all(
        span.open for span in spans if span.group == operation.group and span.is_operation
    )


def _is_guess(blocked: Blocked, views: Sequence[RankView]) -> bool:
    """Return whether the sender of an awaited message is unknown."""
    operation = blocked.operation
    return operation.is_message and operation.partner is None and len(views) > 2


def _reached(
    stalled: Iterable[Blocked], waiting: Mapping[int, Blocked]
) -> tuple[list[Blocked], set[int]]:
    """Traverse the graph: return the waiting ranks, and the ranks at its ends that do not wait."""
    involved = {b.view.rank: b for b in stalled}
    missing: set[int] = set()
    todo = list(involved.values())
    while todo:
        for rank in todo.pop().absent:
            if rank not in waiting:
                missing.add(rank)
            elif rank not in involved:
                involved[rank] = waiting[rank]
                todo.append(waiting[rank])
    return list(involved.values()), missing


def _inside(involved: Sequence[Blocked], views: Sequence[RankView]) -> set[int]:
    """Return ranks that have reached the operation, but left or were stopped before its end."""
    keys = {(b.operation.group, b.operation.channel) for b in involved}
    return {
        view.rank
        for view in views
        if not view.waits and any((op.group, op.channel) in keys for op in view.operations)
    }


def _strangers(involved: Sequence[Blocked], views: Sequence[RankView]) -> set[int]:
    """Return ranks that do not wait and may be members of an involved group."""
    groups = {b.operation.group for b in involved}
    return {v.rank for v in views if not v.waits and not any(map(v.is_known_in, groups))}


def _moves(involved: Sequence[Blocked]) -> bool:
    """Return whether all members have reached the operation and some still work: a transfer."""
    return any(map(_is_busy, involved)) and not any(b.absent for b in involved)


def _new_calls(involved: Sequence[Blocked], since_ns: int) -> bool:
    """Return whether ranks wait only for calls, and one of the calls is new: calls are answered."""
    return all(b.operation.is_call for b in involved) and any(
        b.operation.t_ns > since_ns for b in involved
    )


def _is_busy(blocked: Blocked) -> bool:
    return (blocked.view.process.cpu_share or 0.0) >= BUSY_CORES


def _serves(involved: Sequence[Blocked], missing: Sequence[RankView], since_ns: int) -> bool:
    """Return whether ranks wait only for calls, which other ranks serve with computations or calls.

    A rank that calls others in turn may use little of a busy host's cores.
    """
    return all(b.operation.is_call for b in involved) and all(
        view.services
        and ((view.process.cpu_share or 0.0) >= BUSY_CORES or _last_ns(view) > since_ns)
        for view in missing
    )


def _last_ns(view: RankView) -> int:
    return 0 if view.last is None else view.last.end_ns


def _without_missing(involved: Sequence[Blocked]) -> Cause:
    if any(b.absent for b in involved):
        return deadlock(involved)
    ranks = tuple(sorted(b.view.rank for b in involved))
    return Cause("inside", ranks, "are all in the operation, but none goes on", ADVICE["inside"])


def _waiting_rows(
    involved: Sequence[Blocked], views: Sequence[RankView]
) -> tuple[tuple[tuple[int, ...], str], ...]:
    several = len({b.operation.group for b in involved}) > 1
    rows: dict[str, list[int]] = {}
    for b in involved:
        text = b.operation.title
        if b.operation.site:
            text += f"   {short_site(b.operation.site)}"
        if several:
            members = [v.rank for v in views if v.is_known_in(b.operation.group)]
            more = " and perhaps more" if _is_first(b.operation, views) else ""
            text += f"   group of {rank_list(members)}{more}"
        rows.setdefault(text, []).append(b.view.rank)
    shown = sorted((tuple(sorted(ranks)), text) for text, ranks in rows.items())
    rest = sorted(rank for ranks, _ in shown[MAX_ROWS:] for rank in ranks)
    return (*shown[:MAX_ROWS], *([(tuple(rest), "in other operations")] if rest else []))


def _missing_row(case: HangCase) -> str:
    """Describe a missing rank: its place and process on one line, its last event on another."""
    view, thread = case.view, case.thread
    parts = [f"rank {view.rank} (pid {view.pid})"]
    if thread.place:
        parts.append(f"{f'in {thread.call}  ' if thread.call else 'at '}{thread.place}")
    elif view.phases:
        parts.append(f"in {', '.join(view.phases)}")
    if not view.ended:
        parts.append(_of_process(view.process))
    text = "   ".join(part for part in parts if part)
    last = view.last
    if last is None:
        return text
    ago = format_seconds(case.now_ns - last.end_ns)
    return f"{text}\nlast seen {ago} ago, {_last_known(view, last)}"


def _last_known(view: RankView, last: SpanView) -> str:
    """Describe the last event: `as it ended all_reduce#9  train.py:41 in step, in step 45`."""
    text = f"as it {'began' if last.open else 'ended'} {last.label}"
    if last.site:
        text += f"  {short_site(last.site)}"
    if view.step is not None and last.name != "step":
        text += f", {'in' if view.in_step else 'after'} step {view.step.seq}"
    return text


def _of_process(process: Process) -> str:
    parts = [] if process.cpu_share is None else [f"cpu {100 * process.cpu_share:.0f} %"]
    if process.state:
        parts.append(STATES.get(process.state, f"state {process.state}"))
    return ", ".join(parts)


def _causes(cases: Sequence[HangCase]) -> tuple[Cause, ...]:
    """Return the causes, with one entry for all ranks that have the same cause."""
    merged: dict[tuple[str, str, str], Cause] = {}
    for case in cases:
        cause = cause_of(case)
        key = (cause.kind, cause.text, cause.advice)
        known = merged.get(key)
        merged[key] = (
            cause if known is None else known._replace(ranks=(*known.ranks, case.view.rank))
        )
    return tuple(merged.values())[:MAX_ROWS]


def _labelled(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(label if index == 0 else "", text) for index, text in enumerate(texts)]
