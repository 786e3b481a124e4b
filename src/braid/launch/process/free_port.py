"""Reserves a port for rank 0 of a job.

Problem: a launcher that asks for a free port, closes the socket and passes the number on races with
every other process of the host. Two jobs that start together may then use one port.

Idea: keep the socket bound, without listening, for the whole run. With SO_REUSEADDR on both sides,
Linux lets rank 0's TCPStore listen on the port, but does not assign it to processes that ask for a
free port.

Source: socket(7), SO_REUSEADDR; the rule is in `inet_csk_get_port`
(net/ipv4/inet_connection_sock.c).
"""

from __future__ import annotations

import errno
import socket

import psutil

from braid.errors import ConfigError
from braid.runtime.closing import Closing

__all__ = ["PortReservation"]


class PortReservation(Closing):
    """Keeps a port reserved; a context manager.

    Args:
        port: Number of the port; None for any free port.
        address: Address of this host; other hosts cannot reach the default.

    Attributes:
        port: Number of the reserved port.

    Raises:
        ConfigError: The port is in use; the message names the process that uses it, if known.
    """

    def __init__(self, port: int | None, address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((address, port or 0))
        except OSError as exc:
            self._socket.close()
            why = exc.strerror
            if exc.errno == errno.EADDRINUSE and port is not None:
                why = f"in use{_user_of(port)}"
            msg = (
                f"port {port} is not free for MASTER_PORT: {why}; end that process, or let braid "
                "choose with `--port auto`"
            )
            raise ConfigError(msg) from exc
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port. Idempotent."""
        self._socket.close()


def _user_of(port: int) -> str:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return ""
    pids = {c.pid for c in connections if c.laddr and c.laddr.port == port and c.pid}
    return f" by pid {min(pids)}" if pids else ""
