"""The launcher for one host.

Problem: a launcher of N processes must notice a death at once, inform the remaining ranks and
collect all errors. It must leave no process behind and name the rank that caused the failure. Shell
loops and `mp.spawn` do a part of this. torchrun polls its workers and restarts them.

Idea: a `RankBackend` starts ranks, on one host or several; `supervision` supervises them, wherever
they run. This module combines the two for one host, `several_hosts` for more.
"""

from __future__ import annotations

from braid.launch.process.console import QuietConsole
from braid.launch.process.job import JobSpec, Outcome, check_command
from braid.launch.process.output import Console
from braid.launch.process.processes import SignalInbox
from braid.launch.supervise.local_backend import LocalBackend
from braid.launch.supervise.supervision import carry_out
from braid.runtime.clock import Clock, MonotonicClock

__all__ = ["Supervisor"]


class Supervisor:
    """Runs jobs on this host.

    Args:
        console: Console for output and notices; kept in memory when None.
        clock: Time source; the monotonic clock of the host when None.
        owns_process: Whether this process does nothing but launch. Every descendant left at the end
            of a run is then ended, even one without the run's environment.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        clock: Clock | None = None,
        owns_process: bool = False,
    ) -> None:
        self._console = console or QuietConsole()
        self._clock = clock or MonotonicClock()
        self._owns_process = owns_process

    def run(self, job: JobSpec) -> Outcome:
        """Run a job to its end; signals of this process are forwarded to the ranks.

        Args:
            job: Job to run.

        Returns:
            Outcome of the run; failures of ranks are outcomes, not exceptions.

        Raises:
            ConfigError: The job cannot be started; no process is left running.
        """
        check_command(job)
        with SignalInbox() as inbox, LocalBackend(job, owns_process=self._owns_process) as backend:
            return carry_out(job, self._console, self._clock, inbox, backend)
