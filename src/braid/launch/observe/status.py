"""The present state of a run, folded from the launcher's log, as a table.

started --> starting --> (epoch) training <--> stopped
|                    |
waiting                 +--> leaving, lost, failed, finished
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from braid.launch.observe.live_run import LiveRun
from braid.runtime.clock import Clock
from braid.runtime.diagnose.run_events import RunEvent
from braid.runtime.metrics import MetricRows, average_rows
from braid.runtime.terminal_table import new_table
from braid.runtime.text import number_text, seconds_text

__all__ = ["RankStatus", "RunStatus", "status_of", "status_view", "watch"]

ENDED = ("left", "finished", "lost", "failed", "ended")
RATE_STEPS = 50  # number of last steps over which the rate is averaged
START_S = 1.0  # a process began at most this long after the event of its start
MAX_ENDED = 8  # number of ranks that have ended in the table
STYLES = {"training": "green", "running": "green", "lost": "red", "failed": "red"}


@dataclass(kw_only=True, slots=True)
class RankStatus:
    """State of one rank of a run, for display.

    Attributes:
        rank: Rank.
        pid: Process id.
        host: Host; empty for the launcher's host.
        state: `starting`, `running`, `training`, `waiting`, `stopped`, `left`, `finished`, `lost`,
            `failed` or `ended`.
        started_s: Time of the start, in seconds since 1970.
        changed_s: Time of the last change of the state.
        step: Number of finished steps; -1 without.
        cause: Cause of the state in words.
    """

    rank: int
    pid: int
    host: str
    state: str
    started_s: float
    changed_s: float
    step: int = -1
    cause: str = ""


@dataclass(kw_only=True, slots=True)
class RunStatus:
    """State of a run.

    Attributes:
        name: Name of the run's directory.
        state: `running`, `launcher lost`, or the status of the outcome.
        ranks: States of ranks, by number.
        epoch: Number of the epoch; -1 in a run with fixed members.
        members: Ranks that train.
        step: Number of finished steps; -1 without.
        rate: Finished steps per second over the last steps; NaN if unknown.
        restarts_left: Number of processes that the run may still start for lost ranks; -1 with
            fixed members.
        faults: Events of ranks that were stopped, lost, or left.
        values: Last logged numbers, as averages over ranks.
        checkpoint: Step of the last checkpoint in the run's directory; -1 without.
    """

    name: str
    state: str
    ranks: dict[int, RankStatus] = field(default_factory=dict)
    epoch: int = -1
    members: tuple[int, ...] = ()
    step: int = -1
    rate: float = math.nan
    restarts_left: int = -1
    faults: list[RunEvent] = field(default_factory=list)
    values: Mapping[str, float] = field(default_factory=dict)
    checkpoint: int = -1


def status_of(run: LiveRun) -> RunStatus:
    """Return the present state of a run."""
    outcome = run.record.outcome
    ended = outcome.status if outcome is not None else "launcher lost"
    status = RunStatus(name=run.path.resolve().name, state="running" if run.is_live else ended)
    for event in run.events:
        _fold(status, event)
    for rank, rows in run.rows.items():
        if rows and rank in status.ranks:
            status.ranks[rank].step = int(rows[-1]["step"])
    files = [MetricRows(rows[-RATE_STEPS - 1 :], {}) for rows in run.rows.values() if rows]
    rows = average_rows(files)
    if rows:
        status.step, status.values = int(rows[-1]["step"]), rows[-1]
        timed = [row for row in rows[-RATE_STEPS - 1 :] if "unix_s" in row]
        lasted_s = timed[-1]["unix_s"] - timed[0]["unix_s"] if timed else 0.0
        if lasted_s > 0:
            status.rate = (timed[-1]["step"] - timed[0]["step"]) / lasted_s
    saved = [path.name.removeprefix("step-") for path in run.path.glob("checkpoints/step-*")]
    status.checkpoint = max((int(step) for step in saved if step.isdecimal()), default=-1)
    if status.state == "launcher lost":
        _end_gone_ranks(status, run)
    return status


def _end_gone_ranks(status: RunStatus, run: LiveRun) -> None:
    """Mark ranks of this host as ended if their processes no longer exist."""
    hosts = [host.name for host in run.record.hosts]
    launcher_host = hosts[0] if len(hosts) == 1 else ""
    for rank in status.ranks.values():
        is_here = (rank.host or launcher_host) == socket.gethostname()
        if rank.state in ENDED or not is_here or _is_alive(rank):
            continue
        rank.state, rank.cause = "ended", "after its launcher"
        seen_s = (row["unix_s"] for row in run.rows.get(rank.rank, ()) if "unix_s" in row)
        rank.changed_s = max([rank.changed_s, *seen_s])


def _is_alive(rank: RankStatus) -> bool:
    """Return whether the process of a rank exists, rather than a later one with the same number."""
    try:
        process = psutil.Process(rank.pid)
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return not is_zombie and process.create_time() <= rank.started_s + START_S
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # it exists, but may not be read
        return True


def _fold(status: RunStatus, event: RunEvent) -> None:
    """Take an event into the state of a run."""
    if event.kind == "epoch":
        status.epoch, status.members = event.epoch, event.members
        for rank in status.ranks.values():
            if rank.state not in ENDED and rank.rank in event.members:
                rank.state, rank.changed_s = "training", event.unix_s
    elif event.kind == "started":
        status.restarts_left = event.restarts_left
        status.ranks[event.rank] = RankStatus(
            rank=event.rank,
            pid=event.pid,
            host=event.host,
            state="running" if event.restarts_left < 0 or event.has_role else "starting",
            started_s=event.unix_s,
            changed_s=event.unix_s,
            cause=f"replaces rank {event.replaces}" if event.replaces >= 0 else "",
        )
    elif event.rank in status.ranks:
        changed = status.ranks[event.rank]
        if event.kind == "connected":
            changed.pid = event.pid
            return
        if event.kind == "continued":
            in_epoch = "training" if event.rank in status.members else "waiting"
            changed.state, changed.cause = "running" if status.epoch < 0 else in_epoch, ""
        elif not (event.kind in {"finished", "ended"} and changed.state == "left"):
            changed.state, changed.cause = event.kind, event.text
        changed.changed_s = event.unix_s
        status.members = tuple(
            member for member in status.members if status.ranks[member].state not in ENDED
        )
    if event.kind in {"stopped", "left", "lost", "failed"}:
        status.faults.append(event)


def status_view(status: RunStatus, now_s: float) -> Group:
    """Return the state of a run for a terminal.

    Args:
        status: The state.
        now_s: Time, in seconds since 1970.
    """
    parts = [f"{status.name}: {status.state}"]
    if status.step >= 0:
        parts.append(f"step {status.step:,}")
    if status.checkpoint >= 0:
        parts.append(f"last checkpoint at step {status.checkpoint:,}")
    if math.isfinite(status.rate):
        parts.append(f"{number_text(status.rate)} steps/s")
    if status.epoch >= 0 and status.state == "running":
        parts.append(f"epoch {status.epoch}, {len(status.members)} members")
    if status.restarts_left >= 0 and status.state == "running":
        parts.append(f"restarts left: {status.restarts_left}")
    lines = [Text(", ".join(parts), style="bold")]
    if status.faults:
        fault = status.faults[-1]
        ago = seconds_text(max(0.0, now_s - fault.unix_s))
        text = f"last fault: rank {fault.rank} {fault.text}, {ago} ago"
        lines.append(Text(f"{text} ({len(status.faults)} in all)"))
    return Group(*lines, _table(status, now_s))


def _table(status: RunStatus, now_s: float) -> Table:
    hosts = ["host"] * any(rank.host for rank in status.ranks.values())
    grid = new_table(None, ["rank", "state", *hosts], ["pid", "step", "for"])
    grid.add_column("cause", overflow="fold")
    ended = [rank.rank for rank in status.ranks.values() if rank.state in ENDED]
    hidden = set(ended[:-MAX_ENDED])
    for number, rank in sorted(status.ranks.items()):
        if number not in hidden:
            grid.add_row(
                str(number),
                Text(rank.state, style=STYLES.get(rank.state, "")),
                *[rank.host] * len(hosts),
                str(rank.pid),
                f"{rank.step:,}" if rank.step >= 0 else "",
                seconds_text(max(0.0, now_s - rank.changed_s)),
                rank.cause,
            )
    if hidden:
        grid.caption = f"and {len(hidden)} ranks that ended before"
    return grid


def watch(run: LiveRun, console: Console, clock: Clock, *, every_s: float) -> None:
    """Show the state of a run until the run has ended.

    Args:
        run: The run.
        console: Console to show the state on.
        clock: Waits between two looks.
        every_s: Seconds between two looks; 0 to show the state once.
    """
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(status_view(status_of(run), time.time()), refresh=True)
            if not (every_s and run.is_live):
                return
            clock.sleep(every_s)
            run.refresh()
