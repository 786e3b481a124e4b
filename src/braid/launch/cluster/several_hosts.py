"""The launcher for several hosts.

The launcher reaches the hosts itself, or is one of several launchers that the user has started by
hand. This module is separate from `Supervisor` so that a run on one host does not import it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from braid.errors import ConfigError
from braid.launch.cluster.changing_hosts import ChangingHosts
from braid.launch.cluster.host_rendezvous import HostRendezvous
from braid.launch.cluster.join import INSECURE_WARNING, join_first_node, open_join_listener
from braid.launch.cluster.join_listener import JoinListener
from braid.launch.cluster.listed_slots import ListedSlots, read_hostfile
from braid.launch.cluster.options import EngineHosts, Hosts, Nodes
from braid.launch.process.console import QuietConsole
from braid.launch.process.job import JobSpec, Outcome
from braid.launch.process.output import Console
from braid.launch.process.processes import SignalInbox
from braid.launch.supervise.slots import SlotSource
from braid.launch.supervise.supervision import carry_out
from braid.runtime.clock import Clock, MonotonicClock
from braid.runtime.rendezvous.file_meeting import FileMeeting

__all__ = ["HostsSupervisor"]


class HostsSupervisor:
    """Runs jobs on several hosts, by an agent on each host.

    Args:
        console: Console for output and notices; kept in memory when None.
        clock: Time source; the monotonic clock of the host when None.
    """

    def __init__(self, console: Console | None = None, *, clock: Clock | None = None) -> None:
        self._console = console or QuietConsole()
        self._clock = clock or MonotonicClock()

    def run(self, job: JobSpec, hosts: Hosts, slots: SlotSource | None = None) -> Outcome:
        """Run a job to its end on hosts that this launcher reaches.

        Args:
            job: Job to run; `hosts` determines its number of ranks.
            hosts: Hosts of the job.
            slots: Source of the hosts of an elastic run; None if the hosts are fixed, or come from
                `hosts.hostfile` in a run with `max_ranks`.

        Returns:
            Outcome of the run; failures of ranks and losses of hosts are outcomes, not exceptions.

        Raises:
            ConfigError: A host cannot take part; the message names all such hosts, and no process
                is left running. With `slots`, only if the other hosts have too few slots.
        """
        if slots is None and hosts.hostfile and job.elastic is not None and job.elastic.max_ranks:
            most = job.elastic.max_ranks
            num_slots = sum(host.slots for host in hosts.hosts)
            num_ranks = hosts.num_ranks or min(num_slots, most)
            hosts = replace(hosts, num_ranks=num_ranks)
            read = partial(read_hostfile, hosts.hostfile)
            slots = ListedSlots(read, hosts.hosts, num_ranks, most, self._clock)
        with SignalInbox() as inbox:
            if slots is not None:
                return self._run_elastic(job, hosts, slots, inbox)
            with self._rendezvous(job, hosts, inbox) as rendezvous:
                return self._carry_out(job, inbox, rendezvous)

    def _run_elastic(
        self, job: JobSpec, hosts: Hosts | EngineHosts, slots: SlotSource, inbox: SignalInbox
    ) -> Outcome:
        console, clock = self._console, self._clock
        assert job.elastic is not None
        while True:
            rendezvous = HostRendezvous(job, hosts, inbox, clock, console.notice, may_grow=True)
            with ExitStack() as stack:
                stack.enter_context(rendezvous)
                try:
                    backend = rendezvous.gather()
                except ConfigError:
                    problems = rendezvous.problems
                    usable = tuple(host for host in hosts.hosts if host.name not in problems)
                    num_slots = sum(host.slots for host in usable)
                    is_final = not rendezvous.has_ended or isinstance(hosts, EngineHosts)
                    if is_final or usable == hosts.hosts or num_slots < job.elastic.min_ranks:
                        raise
                    for name, why in problems.items():
                        console.notice(f"host {name} {why}; the run begins without this host")
                        slots.lost(name, is_gone=True)
                    num_ranks = min(num_slots, hosts.num_ranks or num_slots)
                    hosts = replace(hosts, hosts=usable, num_ranks=num_ranks)
                    continue
                job = replace(job, num_ranks=rendezvous.num_ranks)
                changing = stack.enter_context(
                    ChangingHosts(job, hosts, slots, backend, clock, console.notice)
                )
                return carry_out(job, console, clock, inbox, backend, changing)

    def meet(self, job: JobSpec, nodes: Nodes) -> tuple[int, str]:
        """Run a job together with launchers that were started by hand on the other nodes.

        Args:
            job: Job to run, the same on all nodes.
            nodes: Meeting point of the launchers, and number of ranks of this node.

        Returns:
            Exit code of the run, and the error block if it failed.

        Raises:
            ConfigError: A node is missing, late or present twice, or nodes cannot reach each other;
                no process is left running.
        """
        if nodes.insecure_network:
            self._console.notice(INSECURE_WARNING)
        with ExitStack() as stack:
            meeting, point = None, nodes.meeting
            if point.path:
                meeting = stack.enter_context(
                    FileMeeting(point.path, point.num_nodes, point.node_rank)
                )
            if (meeting or point).node_rank != 0:
                bye = join_first_node(job, nodes, self._clock, self._console.notice, meeting)
                return bye.exit_code, bye.text
            inbox = stack.enter_context(SignalInbox())
            join_listener = stack.enter_context(open_join_listener(nodes, self._clock, meeting))
            rendezvous = stack.enter_context(self._rendezvous(job, nodes, inbox))
            outcome = self._carry_out(job, inbox, rendezvous, join_listener)
        return outcome.exit_code, "" if outcome.ok else str(outcome)

    def _rendezvous(
        self, job: JobSpec, where: Hosts | Nodes | EngineHosts, inbox: SignalInbox
    ) -> HostRendezvous:
        return HostRendezvous(job, where, inbox, self._clock, self._console.notice)

    def _carry_out(
        self,
        job: JobSpec,
        inbox: SignalInbox,
        rendezvous: HostRendezvous,
        join_listener: JoinListener | None = None,
    ) -> Outcome:
        backend = rendezvous.gather(join_listener)
        job = replace(job, num_ranks=rendezvous.num_ranks)
        return carry_out(job, self._console, self._clock, inbox, backend)
