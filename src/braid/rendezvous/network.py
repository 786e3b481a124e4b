"""How a rank is reached from other hosts, and the secret that its connections take: what the launcher or the user said of it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from braid.errors import ConfigError
from braid.rendezvous.environment import JobEnvironment
from braid.transport import Network
from braid.wire import Address, Secret

__all__ = ["network_of", "network_of_program"]


def network_of(environment: JobEnvironment, secret: Secret | None) -> tuple[Secret | None, Network]:
    """Secret and network of a rank.

    Args:
        environment: What the launcher said.
        secret: That it handed over; the user's file is read when None.

    Raises:
        ConfigError: The file is not there, or others can read it.
    """
    towards = environment.master_addr
    if environment.store_address:
        towards = Address.parse(environment.store_address).host or towards
    network = Network(environment.listen, towards, insecure=environment.insecure_network)
    if secret is None and environment.secret_file:
        secret = Secret.from_file(environment.secret_file)
    return secret, network


def network_of_program(
    environ: Mapping[str, str] | None = None,
) -> tuple[Secret | None, Network]:
    """The same for programs that say themselves who they are (`init_process_group`): other variables may be missing or wrong."""
    environ = os.environ if environ is None else environ
    told = JobEnvironment(
        listen=environ.get("BRAID_LISTEN", ""),
        secret_file=environ.get("BRAID_SECRET_FILE", ""),
        insecure_network=environ.get("BRAID_INSECURE_NETWORK", "") == "1",
        master_addr=environ.get("MASTER_ADDR", ""),
        store_address=environ.get("BRAID_STORE", ""),
    )
    return network_of(told, _inherited(environ.get("BRAID_SECRET_FD", "")))


def _inherited(fd: str) -> Secret | None:
    """The launcher's secret; a process that some rank has started has the variable, but not the descriptor."""
    try:
        return Secret.from_fd(os.dup(int(fd)))
    except (ValueError, OSError, ConfigError):
        return None
