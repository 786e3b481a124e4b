"""The page about a run under faults, and its summary for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from braid._version import __version__
from braid.launch.chaos.account import ChaosAccount, FaultAccount
from braid.launch.chaos.driver import ChaosRun
from braid.launch.observe.figures import Chart, Lane, Picture, boxes_of, line_chart, time_ticks
from braid.launch.observe.publish import write_page
from braid.launch.observe.report import page_template, this_machine
from braid.launch.observe.run_directory import Run
from braid.runtime.diagnose.block import error_block, render_block
from braid.runtime.diagnose.run_events import RunEvent
from braid.runtime.terminal_table import new_table
from braid.runtime.text import percent_text, seconds_text

__all__ = ["chaos_figures", "members_picture", "print_chaos", "write_chaos_page"]

PAGE = "chaos.html"
ROLES: Mapping[str, str] = {
    "starts": "neutral",
    "waits": "neutral",
    "trains": "phase",
    "stopped": "wait",
}
LEAST_LABEL = 5.0  # percent of the width


def print_chaos(chaos: ChaosRun, console: Console, page: str) -> None:
    """Print the faults and figures of a run, and where its page is."""
    account = chaos.account
    grid = new_table(None, ["fault", "rank", "cause that the launcher named"], ["at", "recovery"])
    for fault in account.faults:
        style = "" if fault.judgement == "right" else "red"
        cause = fault.cause or "none"
        grid.add_row(
            fault.strike.kind,
            ", ".join(map(str, fault.strike.ranks)),
            Text(cause if not style else f"{cause} ({fault.judgement})", style, overflow="fold"),
            f"{fault.strike.unix_s - account.begin_s:.1f} s",
            _seconds(fault.recovery_s),
        )
    grid.columns[2].no_wrap = False
    console.print(grid)
    for name, text in chaos_figures(chaos):
        console.print(Text(f"  {name:<18}{text}"), soft_wrap=True)
    for problem in chaos.problems:
        console.print(Text(f"braid: {problem}", style="red"), soft_wrap=True)
    console.print(Text(f"  page              {page}"), soft_wrap=True)


def chaos_figures(chaos: ChaosRun) -> list[tuple[str, str]]:
    """Return the names and texts of the figures on a run under faults."""
    account = chaos.account
    times = account.recoveries_s
    recoveries = f"{len(times)}"
    if times:
        recoveries += f", median {_seconds(median(times))}, longest {_seconds(times[-1])}"
    named = f"{account.num_right} of {len(account.faults)} right"
    share = _share if not chaos.has_failed else lambda *_: "none, as the run has failed"
    figures = [
        ("goodput", share(account.num_steps, account.num_possible)),
        ("of all ranks", share(account.num_steps, account.num_possible_by_all)),
        ("steps", f"{account.num_steps:,} in {seconds_text(account.end_s - account.begin_s)}"),
        ("lost steps", f"{account.num_lost_steps:,}"),
        ("weights", chaos.weights.text),
        ("recoveries", recoveries),
        ("causes", named if account.faults else "none, as no fault has struck"),
    ]
    if chaos.unstruck:
        kinds = ", ".join(fault.kind for fault in chaos.unstruck)
        reason = (
            "as no rank could be struck in time" if chaos.was_ended else "as the run ended first"
        )
        figures.append(("not struck", f"{len(chaos.unstruck)} faults, {reason}: {kinds}"))
    return figures


def write_chaos_page(chaos: ChaosRun) -> Path:
    """Write the page on a run under faults into its directory, and return its path.

    Raises:
        OSError: The directory cannot be written.
    """
    run = chaos.run
    outcome = run.record.outcome
    path = run.path / PAGE
    html = page_template("chaos.html.jinja").render(
        chaos=chaos,
        command=Run(path=run.path, record=run.record).command_line,
        account=chaos.account,
        figures=chaos_figures(chaos),
        faults=[_FaultRow.of(fault, chaos.account) for fault in chaos.account.faults],
        outcome=render_block(error_block(outcome)) if outcome and not chaos.was_ended else "",
        picture=members_picture(chaos.account, run.events),
        chart=_step_chart(chaos),
        rates=[
            f"{number} rank{'s' * (number > 1)}: {rate:.3g} steps/s"
            for number, rate in chaos.account.rates.items()
        ],
        machine=this_machine(),
        version=__version__,
    )
    write_page(html, path)
    return path


class _FaultRow(NamedTuple):
    at: str
    kind: str
    ranks: str
    cause: str
    judgement: str
    recovery: str

    @classmethod
    def of(cls, fault: FaultAccount, account: ChaosAccount) -> _FaultRow:
        strike = fault.strike
        return cls(
            f"{strike.unix_s - account.begin_s:.1f} s",
            strike.kind + (f" for {strike.lasts_s:.1f} s" if strike.lasts_s else ""),
            ", ".join(map(str, strike.ranks)),
            fault.cause or "none",
            fault.judgement,
            _seconds(fault.recovery_s),
        )


def members_picture(account: ChaosAccount, events: Sequence[RunEvent]) -> Picture:
    """Return a picture of the states of ranks since the first step, with the faults below."""
    begin_s, end_s = account.begin_s, account.end_s
    span_s = max(end_s - begin_s, 1e-3)
    lanes = []
    for rank in sorted({event.rank for event in events if event.rank >= 0}):
        spans = [
            (from_s, to_s, ROLES[state], f"rank {rank} {state} for {seconds_text(to_s - from_s)}",
             state if state != "trains" else "")
            for state, since_s, to_s in _states(rank, events, end_s)
            if to_s > (from_s := max(since_s, begin_s))
        ]  # fmt: skip
        if not spans:
            continue
        struck = [fault for fault in account.faults if rank in fault.strike.ranks]
        faults = [
            (
                fault.strike.unix_s,
                min(end_s, fault.strike.unix_s + max(fault.strike.lasts_s, span_s / 250)),
                "bad",
                f"{fault.strike.kind}: {fault.cause}",
                "",
            )
            for fault in struck
        ]
        phases = boxes_of(spans, begin_s, span_s, least_label=LEAST_LABEL)
        lanes.append(Lane(rank, phases, boxes_of(faults, begin_s, span_s), ()))
    return Picture("Members over time", tuple(lanes), time_ticks(round(span_s * 1e9)))


def _states(
    rank: int, events: Sequence[RunEvent], end_s: float
) -> Iterator[tuple[str, float, float]]:
    """Yield the states of a rank with their begin and end."""
    state, since_s = "", 0.0
    before = ""  # the rank was stopped
    for event in events:
        following = state
        if event.kind == "epoch" and event.rank != rank:
            following = "trains" if rank in event.members and state else state
        elif event.rank != rank:
            continue
        elif event.kind in {"started", "waiting"}:
            following = {"started": "starts", "waiting": "waits"}[event.kind]
        elif event.kind == "stopped":
            before, following = state if state != "stopped" else before, "stopped"
        elif event.kind == "continued":
            following = before
        else:
            following = ""
        if following != state:
            if state:
                yield state, since_s, min(event.unix_s, end_s)
            state, since_s = following, event.unix_s
    if state:
        yield state, since_s, end_s


def _step_chart(chaos: ChaosRun) -> Chart | None:
    """Return the seconds of each step, which show recoveries as peaks."""
    ends: dict[float, float] = {}
    for rows in chaos.run.rows.values():
        for row in rows:
            if "unix_s" in row:
                ends[row["step"]] = min(ends.get(row["step"], math.inf), row["unix_s"])
    steps = sorted(ends)
    lasted = [{"step": step, "s": ends[step] - ends[before]} for before, step in pairwise(steps)]
    return line_chart(lasted, {"s": ("step", "compute")}, y_label="seconds", from_zero=True)


def _share(part: float, whole: float) -> str:
    return f"{percent_text(part / whole)} ({part:,.0f} of {whole:,.0f} steps)" if whole else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if math.isfinite(seconds) else "-"
