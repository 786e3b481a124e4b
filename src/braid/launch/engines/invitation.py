"""Invitation of an agent to its launcher, and the number of the agent's node.

    launcher ── one line of JSON ──> srun | mpirun | an actor of Ray ── stdin ──> agent of each node

The line has the job's secret, so it travels on pipes and in calls of Ray, never in arguments or
variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

import msgspec

from braid.errors import ConfigError
from braid.runtime.wire import Secret

__all__ = ["Invitation", "forget_engine"]

TASK = "SLURM_PROCID"  # number of the agent's node, where one call starts an agent on each
# variables of a process that an engine has started, which would mislead the ranks below it
OF_ONE_PROCESS = (
    *("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_STEP_", "SLURM_STEPID"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("SLURM_TASK_PID", "SLURM_GTIDS"),
)


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Data with which agents (braid's processes on the nodes) join their launcher.

    Attributes:
        addresses: Addresses of the launcher.
        machine: Identifier of the launcher's machine, on which loopback reaches it.
        nodes: Names of the nodes by number.
        secret: Secret of the job, in hexadecimal.
        limit_s: Seconds that an agent tries to reach the launcher.
        node: Number of the agent's node; -1 if the engine sets it in the agent's environment.
    """

    addresses: tuple[str, ...]
    machine: str
    nodes: Mapping[int, str]
    secret: str
    limit_s: float = 60.0
    node: int = -1

    def __repr__(self) -> str:
        return f"Invitation({len(self.nodes)} nodes at {', '.join(self.addresses)})"

    @property
    def key(self) -> Secret:
        """Secret of the job."""
        return Secret(bytes.fromhex(self.secret))

    def number(self, environ: Mapping[str, str]) -> int:
        """Return the number of the agent's node.

        Raises:
            ConfigError: Neither the launcher nor the engine has set the number.
        """
        if self.node >= 0:
            return self.node
        if environ.get(TASK, "").isdecimal():
            return int(environ[TASK])
        msg = (
            f"the number of this node is unknown, because {TASK} is not set: start it with "
            "`braid run --on ...`"
        )
        raise ConfigError(msg)

    def for_node(self, node: int) -> Invitation:
        """Return the invitation of one node's agent."""
        return msgspec.structs.replace(self, node=node)

    def to_line(self) -> bytes:
        """Return the invitation as one line of JSON."""
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Invitation:
        """Read an invitation.

        Raises:
            ConfigError: The line is not an invitation, for example empty because the engine has
                closed stdin.
        """
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.MsgspecError as exc:
            msg = (
                "this process was not started by braid: it got no instructions on stdin: start "
                "it with `braid run --on ...`"
            )
            raise ConfigError(msg) from exc


def forget_engine(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove the engine's variables that describe the agent's process from `environ`.

    Ranks inherit the agent's environment, and get braid's variables instead.
    """
    for name in [name for name in environ if name.startswith(OF_ONE_PROCESS)]:
        del environ[name]
