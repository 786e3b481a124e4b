"""On which hosts a job runs, and how they are found: what the options of `braid run` say beyond one host."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from braid.errors import ConfigError
from braid.launch.cluster.rank_assignment import Host, assign
from braid.launch.cluster.remote_shell import (
    DEFAULT_RSH,
    LocalPlacement,
    Placement,
    RshPlacement,
    is_here,
)
from braid.rendezvous.meeting import MeetingPoint
from braid.wire import Secret

__all__ = ["Hosts", "Nodes", "forwarded", "node_secret"]

# What makes ranks behave alike; anything else belongs to the host that it was set on.
FORWARDED = ("PYTHONPATH", "PYTHONHASHSEED", "BRAID_PORTABLE")
FORWARDED_PREFIXES = ("OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """Hosts that this launcher reaches itself.

    Attributes:
        hosts: The hosts, in the order of their ranks.
        num_ranks: Number of ranks; all slots when None.
        rsh: Command that reaches a host, see `RshPlacement`.
        remote_python: Interpreter there, as words; that of the launcher when empty.
        interfaces: Names of interfaces or networks to restrict the choice of addresses to.
        listen: Address that the launcher's store listens on, such as 0.0.0.0; when empty the one
        that hosts reach it at.
        environ: Names of further variables that ranks shall have from here.
        start_limit_s: How long hosts may take to answer.
    """

    hosts: tuple[Host, ...]
    num_ranks: int | None = None
    rsh: str = DEFAULT_RSH
    remote_python: str = ""
    interfaces: tuple[str, ...] = ()
    listen: str = ""
    environ: tuple[str, ...] = ()
    start_limit_s: float = 60.0

    def __post_init__(self) -> None:
        assign(self.hosts, self.num_ranks)
        _check_listen(self.listen)
        _check_limit("start_limit_s", self.start_limit_s)

    def placement(self, host: Host) -> Placement:
        """How to reach a host; this one is reached without a command, unless one was given."""
        if self.rsh == DEFAULT_RSH and is_here(host.name):
            return LocalPlacement()
        return RshPlacement(host.name, self.rsh, self.remote_python)


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Hosts on each of which the user has started a launcher.

    Attributes:
        meeting: Where the launchers meet.
        slots: Number of ranks of this node.
        secret_file: File with the secret of all nodes, mode 0600; empty when the network is
        trusted.
        insecure_network: Whether to trust whoever comes.
        interfaces: Names of interfaces or networks to restrict the choice of addresses to.
        listen: Address that node 0 listens on, such as 0.0.0.0; when empty the one that nodes reach
        it at.
        join_limit_s: How long nodes may take to come.
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
            problems.append(f"-n is {self.slots}, expected 1 to 4096 ranks on this node")
        if bool(self.secret_file) == self.insecure_network:
            problems.append(
                "nodes trust each other by a secret: set BRAID_SECRET_FILE to a file that all of "
                "them have "
                "(`(umask 077; head -c 32 /dev/urandom > job.secret)`), or say --insecure-network"
                if not self.secret_file
                else "BRAID_SECRET_FILE and --insecure-network exclude each other"
            )
        if problems:
            raise ConfigError("; ".join(problems))
        _check_listen(self.listen)
        _check_limit("join_limit_s", self.join_limit_s)


def forwarded(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """The variables that ranks on other hosts shall have from here.

    Raises:
        ConfigError: One that was named is not set.
    """
    missing = [name for name in names if name not in environ]
    if missing:
        msg = f"expected the variables {', '.join(missing)} to be set, as --env names them"
        raise ConfigError(msg)
    return {
        name: value
        for name, value in environ.items()
        if name in {*FORWARDED, *names} or name.startswith(FORWARDED_PREFIXES)
    }


def node_secret(nodes: Nodes) -> Secret:
    """The secret of all nodes; one that everybody knows on a network that is trusted.

    Raises:
        ConfigError: The file is missing, readable by others, or holds no secret.
    """
    if nodes.insecure_network:
        return Secret(hashlib.sha256(b"braid --insecure-network").digest())
    return Secret.from_file(nodes.secret_file)


def _check_listen(listen: str) -> None:
    try:
        _ = listen and ipaddress.ip_address(listen)
    except ValueError as exc:
        msg = f"expected an IP address to --listen on, found {listen!r}"
        raise ConfigError(msg) from exc


def _check_limit(name: str, value_s: float) -> None:
    if not value_s > 0:
        msg = f"{name} is {value_s:g}, expected more than 0"
        raise ConfigError(msg)
