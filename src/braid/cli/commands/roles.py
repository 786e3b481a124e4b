"""Options of `braid run` that assign roles to ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import tyro

from braid.errors import ConfigError
from braid.launch.process.job import ElasticLimits
from braid.runtime.option_display import shown_as
from braid.runtime.variables import ON_WORKER_LOSS, REPLICAS, RESTARTS, ROLES, SERVERS, SPARES

__all__ = ["Roles"]

# for programs for PS-Lite; braid.compat.pslite computes DMLC_ROLE from the rank
DMLC_SERVERS, DMLC_WORKERS = "DMLC_NUM_SERVER", "DMLC_NUM_WORKER"


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """Numbers of servers, workers and ranks of other roles.

    Attributes:
        servers: Number of ranks that serve a parameter server's tables; they follow rank 0, the
            scheduler. Use with --workers instead of -n.
        workers: Number of ranks that train; they have the last ranks.
        replicas: Number of copies of each shard on other servers. With at least one, the run
            continues if a server dies.
        spares: Number of idle ranks that replace workers that die; with --min-ranks, any rank.
        role: Name and number of ranks of a role, such as `ps:1`; repeat for each role, in the order
            of ranks. Use instead of -n, for programs with remote calls.
        expendable_role: Name of a role, such as `actor`; the run continues if a signal ends a rank
            of this role. Repeat for each role.
        on_worker_loss: Policy for a worker that dies: fail, wait for a new process with its number,
            or shrink to the remaining workers.
        min_ranks: Smallest number of ranks with which `braid.elastic` continues (default: all).
        max_ranks: Largest number of ranks that train with `braid.elastic` (default: -n). A run with
            --hostfile takes hosts and slots that are added to the file, and a run with --on ray
            takes resources that become free.
        restarts: Largest number of processes that replace dead ranks: any rank with --min-ranks
            (default: 3); else workers, servers with replicas and ranks of expendable roles
            (default: 0).
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
    restarts: Annotated[int | None, shown_as("INT")] = None

    def num_ranks(self, n: int | None) -> int | None:
        """Return the total number of ranks.

        Raises:
            ConfigError: Options contradict each other, or a role has no rank.
        """
        if not self.min_ranks and self.max_ranks:
            msg = (
                f"--max-ranks {self.max_ranks} needs a smallest number of ranks: add --min-ranks N"
            )
            raise ConfigError(msg)
        if self.spares and not (self.min_ranks or self.servers or self.workers):
            msg = (
                f"--spares {self.spares} needs --min-ranks, or --servers and --workers: add them, "
                "or leave --spares out"
            )
            raise ConfigError(msg)
        self._check_restarts()
        of_server = (self.servers, self.workers, self.replicas, self.spares * (not self.min_ranks))
        is_server = any(of_server)
        if self.min_ranks and (is_server or self.role):
            msg = "--min-ranks is for ranks without roles: leave out --servers, --workers, --role"
            raise ConfigError(msg)
        if self.role:
            total = sum(count for _, count in self._counts)
            if unknown := set(self.expendable_role) - {name for name, _ in self._counts}:
                msg = (
                    f"--expendable-role names the unknown role {min(unknown)}: add --role "
                    f"{min(unknown)}:COUNT, or leave it out"
                )
                raise ConfigError(msg)
            if is_server or n not in {None, total}:
                msg = (
                    f"--role already sets the number of ranks, {total}: leave out -n, --servers "
                    "and --workers"
                )
                raise ConfigError(msg)
            return total
        if self.expendable_role:
            name = self.expendable_role[0]
            msg = (
                f"--expendable-role needs the number of ranks of {name}: add --role {name}:COUNT "
                "with its number of ranks"
            )
            raise ConfigError(msg)
        if not is_server:
            return n
        if self.servers < 1 or self.workers < 1:
            msg = (
                f"--servers {self.servers} --workers {self.workers}: a parameter server needs at "
                "least 1 server and 1 worker"
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
            msg = f"{roles} need {total} ranks with the scheduler, got -n {n}: leave -n out"
            raise ConfigError(msg)
        return total

    def _check_restarts(self) -> None:
        """Refuse restarts of ranks that cannot be replaced."""
        if not self.restarts or self.min_ranks:
            return
        if not self.servers and not self.expendable_role:
            msg = (
                f"--restarts {self.restarts} needs --min-ranks, --servers or --expendable-role: "
                "add one of them, or leave --restarts out"
            )
            raise ConfigError(msg)
        if self.spares or self.on_worker_loss in {"fail", "shrink"}:
            policy = f"--on-worker-loss {self.on_worker_loss}"
            other = f"--spares {self.spares}" if self.spares else policy
            msg = (
                f"--restarts {self.restarts} cannot be combined with {other}, as only one "
                "process can replace a lost worker: leave one of the two out"
            )
            raise ConfigError(msg)

    def environ(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of ranks, with variables for these options."""
        variables = dict(os.environ if environ is None else environ)
        if self.servers:
            variables[REPLICAS], variables[SPARES] = str(self.replicas), str(self.spares)
            variables[ON_WORKER_LOSS] = self._on_worker_loss
            variables[SERVERS] = variables[DMLC_SERVERS] = str(self.servers)
            variables[DMLC_WORKERS] = str(self.workers)
        if self.role:
            variables[ROLES] = ",".join(self.role)
            variables[RESTARTS] = str(self.restarts or 0)
        return variables

    @property
    def words(self) -> tuple[str, ...]:
        """Words of a command line with these options, except options at their defaults."""
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                values = value if isinstance(value, tuple) else (str(value),)
                words += [f"--{field.name.replace('_', '-')}={text}" for text in values]
        return tuple(words)

    @property
    def elastic(self) -> ElasticLimits | None:
        """Limits of a run in which lost ranks are replaced; None if the ranks are fixed."""
        if not self.min_ranks:
            return ElasticLimits(min_ranks=1, restarts=self.restarts) if self.restarts else None
        return ElasticLimits(
            min_ranks=self.min_ranks,
            max_ranks=self.max_ranks,
            spares=self.spares,
            restarts=3 if self.restarts is None else self.restarts,
        )

    @property
    def _on_worker_loss(self) -> str:
        """Policy for a worker that dies: the chosen one, or `wait` with restarts."""
        return self.on_worker_loss or ("wait" if self.restarts else "")

    @property
    def _counts(self) -> list[tuple[str, int]]:
        """Return names of roles with their numbers of ranks."""
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
        """Sets of expendable ranks; the run ends when no rank of a set remains or is replaced.

        With --restarts, each worker forms one set. If the user starts the processes that replace
        workers, no set contains workers.
        """
        if self.min_ranks:
            return ()
        first = 1 + self.servers
        workers = range(first, first + self.workers + self.spares)
        parts = [range(1, first)]
        if self.restarts:
            parts += [range(worker, worker + 1) for worker in workers]
        elif self.on_worker_loss != "wait":
            parts.append(workers)
        return tuple(frozenset(part) for part in parts if part and self.expendable.issuperset(part))

    @property
    def expendable(self) -> frozenset[int]:
        """Ranks that the run can lose without ending."""
        if self.role:
            ranks = [name for name, count in self._counts for _ in range(count)]
            return frozenset(n for n, name in enumerate(ranks) if name in self.expendable_role)
        if self.min_ranks:
            return frozenset()
        first = 1 + self.servers
        servers = range(1, first if self.replicas else 1)
        goes_on = self.spares or self._on_worker_loss in {"wait", "shrink"}
        workers = range(first, first + self.workers + self.spares if goes_on else first)
        return frozenset([*servers, *workers])
