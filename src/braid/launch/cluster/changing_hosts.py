"""Hosts of an elastic run that come and go: an agent on each host that a source of slots names.

Problem: a source such as a discovery script names hosts, but ranks can start only on a host with an
agent, and a new agent needs seconds, or never comes.

Idea: a source of slots around that source. It gathers each new host as the hosts at the start are
gathered, while the run goes on, and offers the slots of a host once its agent is ready.

    the source names a host           gather it; its slots count when it is ready
    the host cannot be gathered       a notice; to the source, the host is lost
    the agent of a host is lost       the same
    the source drops a host           no more slots: its ranks leave, and then its agent ends
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace

from braid.errors import ConfigError
from braid.launch.cluster.host_rendezvous import HostRendezvous
from braid.launch.cluster.options import EngineHosts, Hosts
from braid.launch.cluster.rank_assignment import Host
from braid.launch.cluster.remote_backend import RemoteBackend
from braid.launch.process.job import JobSpec
from braid.launch.supervise.slots import SlotSource
from braid.runtime.clock import Clock

__all__ = ["ChangingHosts"]

STEP_S = 0.05  # between checks while a host is gathered


class ChangingHosts(AbstractContextManager["ChangingHosts"]):
    """Slots on hosts with an agent, a `SlotSource`; a context manager that owns added agents.

    Args:
        job: Job of the run.
        where: Hosts at the start, and the way to reach further hosts.
        source: Source of hosts and their slots.
        backend: Backend of the run, which has the hosts at the start.
        clock: Time source.
        notice: Shows a text to the user.

    """

    def __init__(
        self,
        job: JobSpec,
        where: Hosts | EngineHosts,
        source: SlotSource,
        backend: RemoteBackend,
        clock: Clock,
        notice: Callable[[str], None],
    ) -> None:
        self._job = job
        self._where = where
        self._source = source
        self._backend = backend
        self._clock = clock
        self._notice = notice
        self._coming: dict[str, HostRendezvous] = {}
        self._problems: dict[str, str] = {}  # the last one of each host
        self._num_nodes = len(backend.hosts)
        self._stack = ExitStack()
        _, problem = source.poll()  # hosts that could not be gathered at the start are lost
        if problem:
            notice(problem)
        self._hosts = self.hosts  # as `poll` has reported them

    @property
    def hosts(self) -> Mapping[str, int]:
        """Slots of the hosts that are ready for ranks."""
        slots = self._source.hosts
        return {host: slots[host] for host in slots if self._backend.has_agent(host)}

    @property
    def deadline_ns(self) -> int:
        """Time at which `poll` is due."""
        due_ns = self._source.deadline_ns
        return min(due_ns, self._clock.after_ns(STEP_S)) if self._coming else due_ns

    def lost(self, host: str, *, is_gone: bool = False) -> None:
        """Record that a rank on a host has died; see `SlotSource.lost`."""
        self._source.lost(host, is_gone=is_gone)

    def poll(self) -> tuple[bool, str]:
        """Look for changes without blocking; return whether `hosts` has changed, and a notice."""
        for host in self._hosts.keys() & self._source.hosts.keys():
            if not self._backend.has_agent(host):
                self._source.lost(host, is_gone=True)
        has_changed, notice = self._source.poll()
        for host, num_slots in self._source.hosts.items():
            if host not in self._coming and not self._backend.has_agent(host):
                self._gather(Host(host, num_slots))
        for host, rendezvous in list(self._coming.items()):
            rendezvous.step()
            if rendezvous.has_ended:
                self._end_gathering(host)
        for host in self._backend.release({*self._source.hosts, *self._coming}):
            self._notice(f"host {host} has left the run")
        hosts = self.hosts
        has_changed |= hosts != self._hosts
        self._hosts = hosts
        return has_changed, notice

    def _gather(self, host: Host) -> None:
        try:
            rendezvous = HostRendezvous(
                self._job,
                replace(self._where, hosts=(host,), num_ranks=None),
                None,
                self._clock,
                self._notice,
                run=self._backend,
                first_node=self._num_nodes,
            )
        except OSError as error:
            self._source.lost(host.name, is_gone=True)
            self._notice(f"host {host.name} cannot be prepared on this host: {error.strerror}")
            return
        self._num_nodes += 1
        self._coming[host.name] = self._stack.enter_context(rendezvous)
        try:
            rendezvous.start_agents()
        except ConfigError as error:
            self._refuse(host.name, error)

    def _end_gathering(self, host: str) -> None:
        rendezvous = self._coming[host]
        try:
            self._backend.add(rendezvous.hosts_ready())
        except ConfigError as error:
            self._refuse(host, error)
        else:
            del self._coming[host]
            self._notice(f"host {host} has joined the run")

    def _refuse(self, host: str, error: ConfigError) -> None:
        """Give up a host that cannot be gathered; the user sees each reason once."""
        rendezvous = self._coming.pop(host)
        problems = [f"host {name} {why}" for name, why in rendezvous.problems.items()]
        rendezvous.abandon()
        self._source.lost(host, is_gone=True)
        text = "; ".join(problems) or str(error)
        if text != self._problems.get(host):
            self._problems[host] = text
            self._notice(f"{text}; the run goes on without host {host}")

    def __exit__(self, *exc_info: object) -> None:
        for rendezvous in self._coming.values():
            rendezvous.abandon()
        self._stack.close()
