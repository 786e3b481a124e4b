"""The environment of PS-Lite's programs, read once and checked.

    DMLC_ROLE                        scheduler, server or worker
    DMLC_PS_ROOT_URI, _PORT          address of the scheduler
    DMLC_NUM_SERVER, DMLC_NUM_WORKER
    DMLC_NODE_HOST                   address on which this node listens; detected when missing
    PS_RESEND, PS_RESEND_TIMEOUT     1 to send unanswered requests again; milliseconds before that
    PS_DROP_MSG                      percentage of arriving messages to drop, for tests
    PS_HEARTBEAT_INTERVAL, _TIMEOUT  seconds
    BRAID_SECRET_FILE                secret of the job (mode 0600), for several hosts
    BRAID_INSECURE_NETWORK           1 to accept any connection on several hosts

Under `braid run --servers N --workers M`, the rank determines the role: DMLC_ROLE and the root are
not needed.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

from braid.errors import ConfigError
from braid.ps.protocol.directory import Role
from braid.runtime.variables import SERVERS

__all__ = ["Environment"]

DEFAULT_RESEND_S = 1.0  # as in PS-Lite
HEARTBEAT_S, LOST_AFTER_S = 1.0, 30.0  # the van's defaults
ROLES: tuple[Role, ...] = ("scheduler", "server", "worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Settings that one process reads from DMLC_ and PS_ variables.

    Attributes:
        role: Role of the process; empty under `braid run`, where the rank determines it.
        num_servers: Number of servers.
        num_workers: Number of workers; 0 under `braid run`, where the world size determines it.
        host: Host of the scheduler.
        port: Port of the scheduler.
        node_host: Host on which this node listens; detected when empty.
        resend_s: Seconds after which unanswered requests are sent again; never when None.
        drop: Fraction of arriving messages to drop.
        heartbeat_s: Seconds after which a heartbeat is sent on an idle link.
        lost_after_s: Seconds of silence after which a node counts as lost.
        secret_file: File with the job's secret; empty for none.
        insecure: Whether nodes of several hosts accept any connection.
    """

    role: str = ""
    num_servers: int = 0
    num_workers: int = 0
    host: str = ""
    port: int = 0
    node_host: str = ""
    resend_s: float | None = None
    drop: float = 0.0
    heartbeat_s: float = HEARTBEAT_S
    lost_after_s: float = LOST_AFTER_S
    secret_file: str = ""
    insecure: bool = False

    @property
    def is_launched(self) -> bool:
        """Whether `braid run` has started this process, so that its rank determines its role."""
        return not self.role

    @property
    def is_one_host(self) -> bool:
        """Whether the scheduler's address is a loopback address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Read the environment.

        Args:
            environ: Variables; the variables of this process when None.

        Raises:
            ConfigError: Variables are missing or invalid; all of them are named.
        """
        environ = os.environ if environ is None else environ
        reader = _PSLiteReader(environ)
        lost_after_s = reader.number("PS_HEARTBEAT_TIMEOUT", LOST_AFTER_S) or LOST_AFTER_S
        heartbeat_s = reader.number("PS_HEARTBEAT_INTERVAL", HEARTBEAT_S) or HEARTBEAT_S
        resend_s: float | None = None
        if environ.get("PS_RESEND", "0") not in {"", "0"}:
            resend_s = reader.number("PS_RESEND_TIMEOUT", 1e3 * DEFAULT_RESEND_S) / 1e3
        drop = reader.number("PS_DROP_MSG", 0.0) / 100
        if not 0 <= drop < 1:
            reader.problems.append(
                f"PS_DROP_MSG must be a percentage from 0 to below 100, got {100 * drop:g}"
            )
        if drop and resend_s is None:
            reader.problems.append(
                "PS_DROP_MSG needs PS_RESEND=1, as dropped requests are otherwise lost"
            )
        launched = bool(environ.get(SERVERS)) and bool(environ.get("RANK"))
        role = "" if launched else environ.get("DMLC_ROLE", "")
        if not launched and role not in ROLES:
            reader.problems.append(
                f"DMLC_ROLE must be one of {', '.join(ROLES)}, got {role!r}; or start the program "
                "with braid run --servers N --workers M"
            )
        settings = cls(
            role=role,
            num_servers=reader.count(SERVERS if launched else "DMLC_NUM_SERVER"),
            num_workers=0 if launched else reader.count("DMLC_NUM_WORKER"),
            host="" if launched else reader.text("DMLC_PS_ROOT_URI"),
            port=0 if launched else reader.count("DMLC_PS_ROOT_PORT"),
            node_host=environ.get("DMLC_NODE_HOST", ""),
            resend_s=resend_s,
            drop=drop,
            heartbeat_s=min(heartbeat_s, lost_after_s / 2),
            lost_after_s=lost_after_s,
            secret_file=environ.get("BRAID_SECRET_FILE", ""),
            insecure=environ.get("BRAID_INSECURE_NETWORK", "") == "1",
        )
        if not (
            launched
            or settings.is_one_host
            or settings.secret_file
            or settings.insecure
            or not settings.host
        ):
            reader.problems.append(
                f"nodes at {settings.host} can be reached by other hosts: give all nodes the same "
                "BRAID_SECRET_FILE (mode 0600; head -c 32 /dev/urandom), or accept any connection "
                "with BRAID_INSECURE_NETWORK=1"
            )
        if reader.problems:
            raise ConfigError("; ".join(reader.problems))
        return settings


class _PSLiteReader:
    """Reads variables, and collects errors in them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.problems: list[str] = []

    def text(self, name: str) -> str:
        value = self._environ.get(name, "")
        if not value:
            self.problems.append(f"{name} is not set")
        return value

    def count(self, name: str) -> int:
        value = self._environ.get(name, "")
        if not value.isdecimal() or int(value) < 1:
            self.problems.append(f"{name} must be a positive number, got {value!r}")
            return 0
        return int(value)

    def number(self, name: str, default: float) -> float:
        value = self._environ.get(name, "")
        try:
            return float(value) if value else default
        except ValueError:
            self.problems.append(f"{name} must be a number, got {value!r}")
            return default
