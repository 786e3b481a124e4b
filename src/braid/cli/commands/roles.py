"""Reads the options of `braid run` that give roles to ranks: a parameter server's, or others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import tyro

from braid.errors import ConfigError
from braid.launch.process.job import ElasticLimits
from braid.runtime.variables import ON_WORKER_LOSS, REPLICAS, ROLES, SERVERS, SPARES

__all__ = ["Roles"]

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
        spares: Ranks that take the places of workers that die; with --min-ranks, of any rank. The
            run goes on when one dies.
        role: Name and number of ranks of a role, such as `ps:1`; once for each role, in the order
            of ranks. In the place of -n, for programs of remote calls.
        expendable_role: Name of a role, such as `actor`, without whose ranks the others go on when
            a signal ends these; once for each.
        on_worker_loss: Policy for workers that die: fail, wait for a new process of its number, or
            shrink to the others.
        min_ranks: Number of ranks with which `braid.elastic` still goes on (default: all).
        max_ranks: Number of ranks that it takes at most (default: -n).
        restarts: Number of processes that are started for ranks that die, with --min-ranks.
    """

    servers: int = 0
    workers: int = 0
    replicas: int = 0
    spares: int = 0
    on_worker_loss: Literal["", "fail", "wait", "shrink"] = ""
    role: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    expendable_role: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    min_ranks: int = 0
    max_ranks: int = 0
    restarts: int = 3

    def num_ranks(self, n: int | None) -> int | None:
        """Return the number of ranks that all options together mean.

        Raises:
            ConfigError: They contradict each other, or a role has no rank.
        """
        if not self.min_ranks and self.max_ranks:
            msg = f"--max-ranks {self.max_ranks} needs --min-ranks"
            raise ConfigError(msg)
        of_server = (self.servers, self.workers, self.replicas, self.spares * (not self.min_ranks))
        is_server = any(of_server)
        if self.min_ranks and (is_server or self.role):
            msg = "--min-ranks is for ranks without roles: leave out --servers, --workers, --role"
            raise ConfigError(msg)
        if self.role:
            total = sum(count for _, count in self._counts)
            if unknown := set(self.expendable_role) - {name for name, _ in self._counts}:
                msg = f"--expendable-role {min(unknown)}: there is no --role {min(unknown)}:COUNT"
                raise ConfigError(msg)
            if is_server or n not in {None, total}:
                msg = f"--role gives {total} ranks: leave out -n, --servers and --workers"
                raise ConfigError(msg)
            return total
        if self.expendable_role:
            msg = f"--expendable-role {self.expendable_role[0]} needs --role with its ranks"
            raise ConfigError(msg)
        if not is_server:
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
        if self.role:
            own[ROLES] = ",".join(self.role)
        return own

    @property
    def words(self) -> tuple[str, ...]:
        """The options that repeat the choice, without those at their default value."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                values = value if isinstance(value, tuple) else (str(value),)
                words += [f"--{field.name.replace('_', '-')}={text}" for text in values]
        return tuple(words)

    @property
    def elastic(self) -> ElasticLimits | None:
        """Limits of an elastic run; None where members are fixed."""
        if not self.min_ranks:
            return None
        return ElasticLimits(
            min_ranks=self.min_ranks,
            max_ranks=self.max_ranks,
            spares=self.spares,
            restarts=self.restarts,
        )

    @property
    def _counts(self) -> list[tuple[str, int]]:
        """Names of roles with their numbers of ranks."""
        counts = []
        for role in self.role:
            name, _, count = role.partition(":")
            if not name or "," in name or not count.isdecimal() or int(count) < 1:
                msg = f"--role {role}: give its name and its number of ranks, as in --role ps:1"
                raise ConfigError(msg)
            counts.append((name, int(count)))
        return counts

    @property
    def needed(self) -> tuple[frozenset[int], ...]:
        """Sets of expendable ranks; one of each must remain: all servers, all workers.

        Not the workers where new processes may take their places.
        """
        if self.min_ranks:
            return ()
        first = 1 + self.servers
        parts = [range(1, first)]
        if self.on_worker_loss != "wait":
            parts.append(range(first, first + self.workers + self.spares))
        return tuple(frozenset(part) for part in parts if part and self.expendable.issuperset(part))

    @property
    def expendable(self) -> frozenset[int]:
        """Ranks without which the others can go on."""
        if self.role:
            ranks = [name for name, count in self._counts for _ in range(count)]
            return frozenset(n for n, name in enumerate(ranks) if name in self.expendable_role)
        if self.min_ranks:
            return frozenset()
        first = 1 + self.servers
        servers = range(1, first if self.replicas else 1)
        goes_on = self.spares or self.on_worker_loss in {"wait", "shrink"}
        workers = range(first, first + self.workers + self.spares if goes_on else first)
        return frozenset([*servers, *workers])
