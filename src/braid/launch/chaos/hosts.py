"""Hosts on one machine: network namespaces on a common bridge, whose cables can be cut.

Problem: ranks of one host share memory, so no fault of a network can strike them.

Idea: a network namespace has its own interfaces and its own loopback. A process in it reaches the
others only through its `eth0`, a virtual cable to a bridge. To cut the host off, the bridge's end
of the cable is taken down.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

from braid.errors import ConfigError

__all__ = ["NamespaceHosts"]

NETWORK = "10.77.0"
MOST_HOSTS = 200


class NamespaceHosts(AbstractContextManager["NamespaceHosts"]):
    """Hosts with addresses 10.77.0.1, .2, ... on eth0; closing it removes them.

    Args:
        names: Names of the hosts.
        network: First three numbers of their addresses.

    Raises:
        ConfigError: This process cannot make network namespaces.
    """

    def __init__(self, names: Sequence[str], network: str = NETWORK) -> None:
        self.names = tuple(names)
        self.prefix = f"b{os.getpid() % 100_000}"
        self._network = network
        self._undo = ExitStack()
        if problem := self._problem():
            msg = f"hosts cannot be made as network namespaces: {problem}"
            raise ConfigError(msg)

    def _problem(self) -> str:
        if os.geteuid() != 0:
            return "root privileges are missing: run the command as root"
        if shutil.which("ip") is None:
            return "the command ip is missing: install it (Debian: apt install iproute2)"
        if not 0 < len(set(self.names)) == len(self.names) <= MOST_HOSTS:
            return f"names must be 1 to {MOST_HOSTS} different host names, got {self.names}"
        return ""

    def __enter__(self) -> NamespaceHosts:
        with self._undo as undo:
            bridge = f"{self.prefix}br"
            self.ip("link", "add", bridge, "type", "bridge")
            undo.callback(self.ip, "link", "del", bridge)
            self.ip("link", "set", bridge, "up")
            for number, host in enumerate(self.names, 1):
                name, port = self.namespace(host), self.port(host)
                self.ip("netns", "add", name)
                undo.callback(self.ip, "netns", "del", name)
                self.ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
                undo.callback(self.ip, "link", "del", port)  # it outlives the namespace's name
                self.ip("link", "set", port, "master", bridge, "up")
                address = f"{self._network}.{number}/24"
                self.ip("-n", name, "addr", "add", address, "dev", "eth0")
                self.ip("-n", name, "link", "set", "eth0", "up")
                self.ip("-n", name, "link", "set", "lo", "up")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    @property
    def rsh(self) -> str:
        """Command that runs a program on {host}, for `braid run --rsh`."""
        return f"ip netns exec {self.namespace('{host}')}"

    def namespace(self, host: str) -> str:
        """Return the name of a host's namespace."""
        return self.prefix + host

    def port(self, host: str) -> str:
        """Return the name of the bridge's end of a host's virtual cable (veth)."""
        return f"{self.prefix}p{self.names.index(host)}"

    def cut(self, host: str) -> None:
        """Disconnect a host from the network of the other hosts."""
        self.ip("link", "set", self.port(host), "down")

    def mend(self, host: str) -> None:
        """Connect a host again after `cut`."""
        self.ip("link", "set", self.port(host), "up")

    def mend_all(self) -> None:
        """Connect all hosts again."""
        for host in self.names:
            self.mend(host)

    def on(self, host: str, words: Sequence[str]) -> list[str]:
        """Return the argument list that runs the command `words` on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *words]

    def ip(self, *words: str) -> None:
        """Run the command `ip` with the arguments `words`.

        Raises:
            ConfigError: The command fails.
        """
        result = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
        if result.returncode:
            msg = f"ip {' '.join(words)} failed: {result.stderr.strip()}"
            raise ConfigError(msg)
