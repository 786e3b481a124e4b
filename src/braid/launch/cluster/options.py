"""Options of `braid run` for several hosts."""

from __future__ import annotations

import hashlib
import ipaddress
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from braid.errors import ConfigError, raise_all
from braid.launch.cluster.rank_assignment import Host, assign
from braid.launch.cluster.remote_shell import (
    DEFAULT_RSH,
    LocalPlacement,
    Placement,
    RshPlacement,
    is_here,
)
from braid.runtime.rendezvous.meeting import MeetingPoint
from braid.runtime.wire import Secret

__all__ = [
    "OF_THE_JOB",
    "AgentStarter",
    "EngineHosts",
    "Hosts",
    "JobHosts",
    "Nodes",
    "forwarded",
    "node_secret",
]

# Variables that make ranks behave alike; any other variable belongs to the host on which it is set.
OF_THE_JOB = (  # the same on all hosts, however they are started
    *("BRAID_SERVERS", "BRAID_REPLICAS", "BRAID_SPARES", "BRAID_ON_WORKER_LOSS"),
    *("BRAID_ROLES", "BRAID_NO_FRAME_MAC"),
    *("DMLC_NUM_SERVER", "DMLC_NUM_WORKER"),
)
FORWARDED = ("PYTHONPATH", "PYTHONHASHSEED", "BRAID_PORTABLE", *OF_THE_JOB)
FORWARDED_PREFIXES = ("OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "THP_", "MALLOC_")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHosts:
    """Hosts of a job, however their agents are started.

    Attributes:
        hosts: Hosts in the order of their ranks.
        num_ranks: Number of ranks; the number of all slots when None.
        interfaces: Names of interfaces or networks to which addresses are restricted.
        listen: Address on which the launcher's store listens, such as 0.0.0.0; the address at which
            hosts reach the launcher when empty.
        environ: Names of further environment variables that ranks receive from this host.
        start_limit_s: Seconds that hosts have to answer, or agents to join.
    """

    hosts: tuple[Host, ...]
    num_ranks: int | None = None
    interfaces: tuple[str, ...] = ()
    listen: str = ""
    environ: tuple[str, ...] = ()
    start_limit_s: float = 60.0

    def __post_init__(self) -> None:
        assign(self.hosts, self.num_ranks)
        _check_listen(self.listen)
        _check_limit("start_limit_s", self.start_limit_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts(JobHosts):
    """Hosts on which this launcher starts agents; see `JobHosts`.

    Attributes:
        rsh: Command that runs a program on a host; see `RshPlacement`.
        remote_python: Command of the interpreter on the hosts; the launcher's path when empty.
        hostfile: File that names the hosts; an elastic run with `max_ranks` reads it again.
    """

    rsh: str = DEFAULT_RSH
    remote_python: str = ""
    hostfile: str = ""

    def placement(self, host: Host) -> Placement:
        """Return the way to start an agent on a host; on this host, without `rsh` by default."""
        if self.rsh == DEFAULT_RSH and is_here(host.name):
            return LocalPlacement()
        return RshPlacement(host.name, self.rsh, self.remote_python)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Hosts where the user starts one launcher each.

    Attributes:
        meeting: Meeting point of the launchers.
        slots: Number of ranks of this node.
        secret_file: File with the secret of all nodes, mode 0600; empty on a trusted network.
        insecure_network: Whether to accept any node without a secret.
        interfaces: Names of interfaces or networks to which addresses are restricted.
        listen: Address on which node 0 listens, such as 0.0.0.0; the address at which nodes reach
            it when empty.
        join_limit_s: Seconds that nodes have to join.
    """

    meeting: MeetingPoint
    slots: int = 1
    secret_file: str = ""
    insecure_network: bool = False
    interfaces: tuple[str, ...] = ()
    listen: str = ""
    join_limit_s: float = 300.0

    def __post_init__(self) -> None:
        problems = []
        if not 1 <= self.slots <= 4096:
            problems.append(f"-n must be 1 to 4096 ranks on this node, got {self.slots}")
        if bool(self.secret_file) == self.insecure_network:
            problems.append(
                "nodes need a common secret: set BRAID_SECRET_FILE to a file that all nodes have "
                "(`(umask 077; head -c 32 /dev/urandom > job.secret)`), or give --insecure-network"
                if not self.secret_file
                else "BRAID_SECRET_FILE and --insecure-network exclude each other"
            )
        raise_all(problems)
        _check_listen(self.listen)
        _check_limit("join_limit_s", self.join_limit_s)


class AgentStarter(Protocol):
    """Interface to start agents, which start ranks, on nodes with one call.

    The agents join this launcher.
    """

    def invite(
        self, addresses: Sequence[str], nodes: Mapping[int, str], key: bytes, limit_s: float
    ) -> None:
        """Start an agent on each node.

        Args:
            addresses: Addresses of this launcher.
            nodes: Names of the nodes by number.
            key: Secret of the job.
            limit_s: Seconds that agents try to reach this launcher.
        """

    def why_missing(self, node: int) -> str:
        """Return why no agent can join from a node any more; empty while one may join."""

    def why_lost(self, node: int, limit_s: float) -> str:
        """Return why a node is gone; empty if the reason is not known within `limit_s`."""

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register with a selector; the data of a key is the function to call."""

    def unregister(self) -> None:
        """Unregister from the selector. Idempotent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineHosts(JobHosts):
    """Nodes of a cluster with an engine, such as Slurm, that starts the agents; see `JobHosts`.

    Attributes:
        starter: Starts the agents.
    """

    starter: AgentStarter


def forwarded(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables that ranks on other hosts receive from this host.

    Args:
        environ: Environment variables of this host.
        names: Names of variables that the user wants to pass.

    Raises:
        ConfigError: A variable of `names` is not set.
    """
    missing = [name for name in names if name not in environ]
    if missing:
        names_text = ", ".join(missing)
        msg = f"--env names variables that are not set: {names_text}; set them, or leave them out"
        raise ConfigError(msg)
    return {
        name: value
        for name, value in environ.items()
        if name in {*FORWARDED, *names} or name.startswith(FORWARDED_PREFIXES)
    }


def node_secret(nodes: Nodes) -> Secret:
    """Return the secret of all nodes; a well-known one with `--insecure-network`.

    Raises:
        ConfigError: The file is missing, readable by other users, or contains no secret.
    """
    if nodes.insecure_network:
        return Secret(hashlib.sha256(b"braid --insecure-network").digest())
    return Secret.from_file(nodes.secret_file)


def _check_listen(listen: str) -> None:
    try:
        _ = listen and ipaddress.ip_address(listen)
    except ValueError as exc:
        msg = f"--listen must be an IP address, got {listen!r}"
        raise ConfigError(msg) from exc


def _check_limit(name: str, value_s: float) -> None:
    if not value_s > 0:
        msg = f"{name} must be more than 0, got {value_s:g}"
        raise ConfigError(msg)
