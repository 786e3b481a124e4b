"""The launcher for nodes that an engine gives: `braid run --on ray|slurm|mpi`."""

from __future__ import annotations

from braid.launch.cluster.options import EngineHosts
from braid.launch.cluster.several_hosts import HostsSupervisor
from braid.launch.engines.client import EngineClient
from braid.launch.engines.options import EngineOptions
from braid.launch.process.job import JobSpec, Outcome, check_command
from braid.launch.process.processes import SignalInbox

__all__ = ["EngineSupervisor"]


class EngineSupervisor(HostsSupervisor):
    """Runs jobs on nodes of an engine; see `HostsSupervisor`."""

    def run_on(self, job: JobSpec, options: EngineOptions) -> Outcome:
        """Run a job to its end.

        Args:
            job: Job to run; the engine's nodes determine its number of ranks.
            options: Engine, and what is wanted of it.

        Returns:
            Outcome of the run; failures of ranks and losses of nodes are outcomes, not exceptions.

        Raises:
            ConfigError: The engine is not there, or does not give the nodes; no process is left.
        """
        check_command(job)
        words = [f"--num-ranks={options.num_ranks or 0}", *options.words]
        with SignalInbox() as inbox, EngineClient(options.engine, words) as client:
            hosts = client.hosts(options.start_limit_s, self._console.notice, inbox)
            where = EngineHosts(
                hosts=hosts,
                starter=client,
                num_ranks=options.num_ranks,
                interfaces=options.interfaces,
                listen=options.listen,
                environ=options.environ,
                start_limit_s=options.start_limit_s,
            )
            with self._rendezvous(job, where, inbox) as rendezvous:
                listener = rendezvous.listen()
                return self._carry_out(job, inbox, rendezvous, listener)
