"""Parses the address at which launchers that were started by hand on several hosts meet.

Problem: other launchers have pairs of options for this (`--master-addr --master-port`,
`--rdzv-backend --rdzv-endpoint`, a file for NFS). With a wrong value in one of them they hang.

Idea: one address in three forms; all mistakes are reported in one message, before any launcher
waits.

    tcp://10.0.0.1:29400     the launcher of node 0 listens at this address
    file:///shared/job7      launchers find node 0 through a file that all of them can open
    env://                   tcp:// with MASTER_ADDR and MASTER_PORT; NODE_RANK and NNODES replace
                             options that are not given

Source: the `init_method` of torch.distributed.init_process_group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from braid.errors import ConfigError
from braid.runtime.wire import Address

__all__ = ["MeetingPoint"]

FORMS = "write tcp://host:port, file:///shared/path or env://"


class MeetingPoint(NamedTuple):
    """Meeting point of launchers, and the number of this launcher.

    Attributes:
        num_nodes: Number of launchers.
        node_rank: Number of this launcher; None if the file assigns it.
        host: Name or address of node 0; empty for a file.
        port: Port of node 0; 0 for a file.
        path: Path of the file; empty for an address.
    """

    num_nodes: int
    node_rank: int | None = None
    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        num_nodes: int | None,
        node_rank: int | None,
        environ: Mapping[str, str],
    ) -> MeetingPoint:
        """Parse the options `--rdzv`, `--nnodes` and `--node-rank`.

        Args:
            text: Value of `--rdzv`.
            num_nodes: Value of `--nnodes`; None to take it from NNODES.
            node_rank: Value of `--node-rank`; None to take it from NODE_RANK (or GROUP_RANK).
            environ: Environment variables; used for `env://` only.

        Raises:
            ConfigError: A value is missing or invalid; the message lists all problems.
        """
        problems: list[str] = []
        host, port, path = "", 0, ""
        if text == "env://":
            host = environ.get("MASTER_ADDR", "")
            port = _number(environ, ("MASTER_PORT",), problems) or 0
            if num_nodes is None:
                num_nodes = _number(environ, ("NNODES", "GROUP_WORLD_SIZE"), problems)
            if node_rank is None:
                node_rank = _number(environ, ("NODE_RANK", "GROUP_RANK"), problems)
            if not host:
                problems.append("MASTER_ADDR is not set: set it to the host of node 0")
        elif text.startswith("file:///") and len(text) > len("file:///"):
            path = text.removeprefix("file://")
        elif text.startswith("tcp://"):
            address = Address.parse(text)
            host, port = address.host, address.port
            if not port:
                problems.append(f"{text} has port 0, but all nodes must know the port")
        else:
            problems.append(f"--rdzv is {text!r}: {FORMS}")
        problems += _node_problems(num_nodes, node_rank, by_file=bool(path))
        if problems:
            msg = f"nodes cannot meet: {'; '.join(problems)}"
            raise ConfigError(msg)
        return cls(num_nodes or 1, node_rank, host, port, path)

    @property
    def address(self) -> str:
        """Address of node 0, as `tcp://host:port`; empty for a file."""
        return str(Address(host=self.host, port=self.port)) if self.host else ""

    def __str__(self) -> str:
        return self.address or f"file://{self.path}"


def _node_problems(num_nodes: int | None, node_rank: int | None, *, by_file: bool) -> list[str]:
    if num_nodes is None:
        return ["--nnodes is not given"]
    if num_nodes < 1:
        return [f"--nnodes must be at least 1, got {num_nodes}"]
    if node_rank is None:
        return [] if by_file else ["--node-rank is not given"]
    if not 0 <= node_rank < num_nodes:
        limits = f"0 to {num_nodes - 1} (--nnodes {num_nodes})"
        return [f"--node-rank must be {limits}, got {node_rank}"]
    return []


def _number(environ: Mapping[str, str], names: tuple[str, ...], problems: list[str]) -> int | None:
    for name in names:
        value = environ.get(name, "")
        if value:
            if value.isascii() and value.isdigit() and len(value) < 10:
                return int(value)
            problems.append(f"{name} must be a number, got {value!r}")
            return None
    problems.append(f"{names[0]} is not set")
    return None
