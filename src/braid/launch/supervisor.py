"""The launcher: starts the ranks of a run, on this host or on several, watches them, ends them together and says who is guilty.

Problem: whoever starts N processes must answer for all of them: see a death at once, tell the others why, collect what each
said, leave nothing behind, and never blame a victim. Shell loops and `mp.spawn` do a part of this; torchrun polls its
workers and restarts them before anybody has looked.

Idea: a `Crew` knows where ranks are and how to start them there; a `Run` watches them, wherever that is. This file puts the two
together.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from braid.clock import Clock, MonotonicClock
from braid.launch.console import QuietConsole
from braid.launch.crew import Crew
from braid.launch.following import INSECURE, follow, open_lobby
from braid.launch.job import JobSpec, Outcome, check_command
from braid.launch.local_crew import LocalCrew
from braid.launch.muster import Muster
from braid.launch.output import Console
from braid.launch.processes import SignalInbox
from braid.launch.run import Run
from braid.launch.where import Hosts, Nodes
from braid.rendezvous.file_meeting import FileMeeting

__all__ = ["Supervisor"]


class Supervisor:
    """Runs jobs.

    Args:
        console: Where output and notices go; kept in memory when None.
        clock: Time source; the host's when None.
        owns_process: Set by a program that does nothing but launch: every descendant left at the end of a run is then
            ended, even one that hides its origin.
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

    def run(self, job: JobSpec, where: Hosts | None = None) -> Outcome:
        """Run a job to its end; signals of this process are forwarded to its ranks meanwhile.

        Args:
            job: What to run; where `where` is given, it says how many ranks there are.
            where: The hosts to run it on; this one when None.

        Returns:
            What came of it; failures of ranks are outcomes, not exceptions.

        Raises:
            ConfigError: The job cannot be started; nothing is left running.
        """
        if where is None:
            check_command(job)
            with SignalInbox() as inbox, LocalCrew(job, owns_process=self._owns_process) as crew:
                return self._carry_out(job, inbox, crew)
        with SignalInbox() as inbox, self._muster(job, where, inbox) as muster:
            crew_of_hosts = muster.gather()
            return self._carry_out(replace(job, num_ranks=muster.num_ranks), inbox, crew_of_hosts)

    def meet(self, job: JobSpec, nodes: Nodes) -> tuple[int, str]:
        """Run a job on nodes each of which has a launcher, started by hand: this is one of them.

        Args:
            job: What to run, the same on all nodes.
            nodes: Where they meet, and how many ranks this one has.

        Returns:
            Exit code of the run, and the error block if it failed.

        Raises:
            ConfigError: Nodes are missing, late or there twice, or cannot see each other; nothing is left running.
        """
        if nodes.insecure_network:
            self._console.notice(INSECURE)
        with ExitStack() as stack:
            meeting, point = None, nodes.meeting
            if point.path:
                meeting = stack.enter_context(
                    FileMeeting(point.path, point.num_nodes, point.node_rank)
                )
            if (meeting or point).node_rank != 0:
                bye = follow(job, nodes, self._clock, self._console.notice, meeting)
                return bye.exit_code, bye.text
            inbox = stack.enter_context(SignalInbox())
            lobby = stack.enter_context(open_lobby(nodes, self._clock, meeting))
            muster = stack.enter_context(self._muster(job, nodes, inbox))
            crew = muster.gather(lobby)
            outcome = self._carry_out(replace(job, num_ranks=muster.num_ranks), inbox, crew)
        return outcome.exit_code, "" if outcome.ok else str(outcome)

    def _muster(self, job: JobSpec, where: Hosts | Nodes, inbox: SignalInbox) -> Muster:
        return Muster(job, where, inbox, self._clock, self._console.notice)

    def _carry_out(self, job: JobSpec, inbox: SignalInbox, crew: Crew) -> Outcome:
        with Run(job, self._console, self._clock, inbox, crew) as run:
            try:
                run.attend()
            finally:
                run.settle()
            outcome = run.conclude()
        crew.dismiss(outcome.exit_code, "" if outcome.ok else str(outcome))
        return outcome
