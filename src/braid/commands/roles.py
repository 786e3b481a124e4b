"""Reads the options of `braid run` that give ranks the roles of a parameter server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from braid.errors import ConfigError

__all__ = ["REPLICAS", "SERVERS", "Roles"]

SERVERS = "BRAID_SERVERS"  # read by braid.ps.join
SPARES = "BRAID_SPARES"  # and this
ON_WORKER_LOSS = "BRAID_ON_WORKER_LOSS"
REPLICAS = "BRAID_REPLICAS"  # read there, too
# read by programs for PS-Lite; braid.compat.pslite makes DMLC_ROLE of the rank
DMLC_SERVERS, DMLC_WORKERS = "DMLC_NUM_SERVER", "DMLC_NUM_WORKER"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Numbers of servers and workers.

    Attributes:
        servers: Ranks that serve a parameter server's tables: those after rank 0, which schedules.
            With --workers in the place of -n.
        workers: Ranks that train: the last ones.
        replicas: Copies of each shard on other servers. With at least one, the run goes on when a
            server dies.
        spares: Ranks that take the places of workers that die. The run goes on when a worker dies.
        on_worker_loss: Policy for workers that die: fail, wait for a new process of its number, or
            shrink to the others.
    """

    servers: int = 0
    workers: int = 0
    replicas: int = 0
    spares: int = 0
    on_worker_loss: Literal["", "fail", "wait", "shrink"] = ""

    def num_ranks(self, n: int | None) -> int | None:
        """Return the number of ranks that all options together mean.

        Raises:
            ConfigError: They contradict each other, or a role has no rank.
        """
        if not any((self.servers, self.workers, self.replicas, self.spares)):
            return n
        if self.servers < 1 or self.workers < 1:
            msg = (
                f"--servers {self.servers} --workers {self.workers}: a parameter server needs at "
                "least one of each"
            )
            raise ConfigError(msg)
        if not 0 <= self.replicas < self.servers:
            msg = (
                f"--replicas {self.replicas} needs {self.replicas + 1} servers, got --servers "
                f"{self.servers}"
            )
            raise ConfigError(msg)
        total = 1 + self.servers + self.workers + self.spares
        if n not in {None, total}:
            roles = f"--servers {self.servers} and --workers {self.workers}"
            msg = f"{roles} are {total} ranks with the scheduler, got -n {n}"
            raise ConfigError(msg)
        return total

    def environ(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of ranks, which know the number of servers by it."""
        own = dict(os.environ if environ is None else environ)
        if self.servers:
            own[REPLICAS], own[SPARES] = str(self.replicas), str(self.spares)
            own[ON_WORKER_LOSS] = self.on_worker_loss
            own[SERVERS] = own[DMLC_SERVERS] = str(self.servers)
            own[DMLC_WORKERS] = str(self.workers)
        return own

    @property
    def expendable(self) -> frozenset[int]:
        """Ranks without which the others can go on."""
        first = 1 + self.servers
        servers = range(1, first if self.replicas else 1)
        goes_on = self.spares or self.on_worker_loss in {"wait", "shrink"}
        workers = range(first, first + self.workers + self.spares if goes_on else first)
        return frozenset([*servers, *workers])
