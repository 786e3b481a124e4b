"""The launcher: starts the ranks of a run on this host, watches them, ends them together and says which rank is the cause.

Problem: whoever starts N processes must answer for all of them: see a death at once, tell the
others why, collect what each said, leave nothing behind, and never blame a victim. Shell loops and
`mp.spawn` do a part of this; torchrun polls its workers and restarts them before anybody has
looked.

Idea: a `RankBackend` knows where ranks are and how to start them there; a `Run` watches them,
wherever that is. This file puts the two together for one host, `several_hosts` for more.
"""

from __future__ import annotations

from braid.clock import Clock, MonotonicClock
from braid.launch.process.console import QuietConsole
from braid.launch.process.job import JobSpec, Outcome, check_command
from braid.launch.process.output import Console
from braid.launch.process.processes import SignalInbox
from braid.launch.supervise.local_backend import LocalBackend
from braid.launch.supervise.supervision import carry_out

__all__ = ["Supervisor"]


class Supervisor:
    """Runs jobs on this host.

    Args:
        console: Where output and notices go; kept in memory when None.
        clock: Time source; the host's when None.
        owns_process: Set by a program that does nothing but launch: every descendant left at the
            end of a run is then ended, even one that hides its origin.
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
        """Run a job to its end; signals of this process are forwarded to its ranks meanwhile.

        Args:
            job: What to run.

        Returns:
            What came of it; failures of ranks are outcomes, not exceptions.

        Raises:
            ConfigError: The job cannot be started; nothing is left running.
        """
        check_command(job)
        with SignalInbox() as inbox, LocalBackend(job, owns_process=self._owns_process) as backend:
            return carry_out(job, self._console, self._clock, inbox, backend)
