"""Determines a rank's network settings and secret from the launcher's environment."""

from __future__ import annotations

import os

from braid.errors import ConfigError
from braid.runtime.rendezvous.environment import JobEnvironment, wants_frame_codes
from braid.runtime.transport import Network
from braid.runtime.wire import Address, Secret

__all__ = ["network_of", "network_of_program"]


def network_of(environment: JobEnvironment, secret: Secret | None) -> tuple[Secret | None, Network]:
    """Return the secret and the network settings of a rank.

    Args:
        environment: Settings from the launcher.
        secret: Secret from the launcher; the user's file is read when None.

    Raises:
        ConfigError: The file is missing, or other users can read it.
    """
    towards = environment.master_addr
    if environment.store_address:
        towards = Address.parse(environment.store_address).host or towards
    seals = wants_frame_codes()
    network = Network(
        environment.listen, towards, insecure=environment.insecure_network, seals_frames=seals
    )
    if secret is None and environment.secret_file:
        secret = Secret.from_file(environment.secret_file)
    return None if secret is None else secret.sealing(seals), network


def network_of_program() -> tuple[Secret | None, Network]:
    """Return the secret and the network settings of a program that calls `init_process_group`.

    The program chooses its rank itself, so only the variables of the network are read.
    """
    environ = os.environ
    environment = JobEnvironment(
        listen=environ.get("BRAID_LISTEN", ""),
        secret_file=environ.get("BRAID_SECRET_FILE", ""),
        insecure_network=environ.get("BRAID_INSECURE_NETWORK", "") == "1",
        master_addr=environ.get("MASTER_ADDR", ""),
        store_address=environ.get("BRAID_STORE", ""),
    )
    return network_of(environment, _inherited(environ.get("BRAID_SECRET_FD", "")))


def _inherited(fd: str) -> Secret | None:
    """Return the launcher's secret; None in a child of a rank, which lacks the descriptor."""
    try:
        return Secret.from_fd(os.dup(int(fd)))
    except (ValueError, OSError, ConfigError):
        return None
