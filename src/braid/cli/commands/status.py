"""`braid status`: the current state of a run."""

from __future__ import annotations

from typing import Annotated

import tyro

from braid.runtime.option_types import Interval, shown_as

__all__ = ["status"]


def status(
    run_directory: Annotated[tyro.conf.Positional[str], shown_as("RUN")] = "",
    *,
    once: bool = False,
    every_s: Interval = 1.0,
    prometheus: Annotated[str, shown_as("FILE|PORT")] = "",
) -> int:
    """Show the ranks of a running job: states, members, steps, faults.

    Args:
        run_directory: Directory of the run (default: the last one in ./runs).
        once: Print the state once.
        every_s: Time between two updates, such as 0.5s or 1m.
        prometheus: Export the state to Prometheus instead: a file for the textfile collector of
            node_exporter, such as /var/lib/node_exporter/braid.prom, or a port on 127.0.0.1.
    """
    from pathlib import Path

    from rich.console import Console

    from braid.launch.observe.live_run import LiveRun, latest_run
    from braid.launch.observe.prometheus import export
    from braid.launch.observe.status import watch
    from braid.runtime.clock import MonotonicClock

    run = LiveRun(Path(run_directory) if run_directory else latest_run(Path("runs")))
    clock = MonotonicClock()
    if prometheus:
        export(run, prometheus, clock, every_s=0.0 if once else every_s)
    else:
        watch(run, Console(), clock, every_s=0.0 if once else every_s)
    return 0
