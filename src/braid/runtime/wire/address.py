"""Addresses as text, for environment variables and error messages.

unix:@braid-a3f       abstract socket of this host, which leaves no file behind (Linux)
unix:/run/braid.sock  socket file
tcp://10.0.0.1:29400  host and port; tcp://[::1]:0 for IPv6; port 0 lets the system choose
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from braid.errors import ConfigError

__all__ = ["Address", "local_address"]

_FORMS = "write unix:@name, unix:/path or tcp://host:port"


class Address(NamedTuple):
    """Address on which a process accepts connections: a unix socket, or a host and a port.

    Attributes:
        path: Path of a unix socket; begins with `@` when abstract. Empty for TCP.
        host: Name or number of a host. Empty for unix sockets.
        port: TCP port; 0 to let the system choose.
    """

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse an address.

        Raises:
            ConfigError: `text` is not an address.
        """
        if text.startswith("unix:"):
            path = text.removeprefix("unix:")
            if path.startswith("/") or (path.startswith("@") and len(path) > 1):
                return cls(path=path)
        elif text.startswith("tcp://"):
            try:
                parts = urlsplit(text)
                plain = parts.netloc == text.removeprefix("tcp://") and "@" not in text
                if plain and parts.hostname and parts.port is not None:
                    return cls(host=parts.hostname, port=parts.port)
            except ValueError:  # the port is not a number, or a bracket is not closed
                pass
        msg = f"{text!r} is not an address: {_FORMS}"
        raise ConfigError(msg)

    @property
    def is_unix(self) -> bool:
        """Whether this is a unix socket; its peers have a user id."""
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """Whether no other host can reach this address."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may be the name of any host
            return False

    def resolve(self) -> tuple[int, Any]:
        """Return family and address for the socket module.

        Raises:
            OSError: The host's name is unknown.
        """
        if self.is_unix:
            name = "\0" + self.path[1:] if self.path.startswith("@") else self.path
            return socket.AF_UNIX, name
        addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        family, _, _, _, where = addresses[0]
        return family, where

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


def local_address(name: str) -> str:
    """Return a new address for a listener that only this host can reach.

    Args:
        name: Part of the address, to recognize the socket in a list of sockets.
    """
    if sys.platform != "linux":
        return "tcp://127.0.0.1:0"
    return f"unix:@braid-{os.urandom(8).hex()}-{name}"
