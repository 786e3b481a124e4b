"""Lists the network addresses of this host and identifies its network namespace.

Source: getifaddrs(3) through psutil; network_namespaces(7).
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from typing import NamedTuple

import psutil

__all__ = ["Interface", "interfaces", "machine"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACE = Path("/proc/self/ns/net")


class Interface(NamedTuple):
    """An address of a network interface of this host.

    Attributes:
        name: Name of the interface.
        ip: IP address.
        prefix: Number of leading bits that identify the network.
    """

    name: str
    ip: str
    prefix: int


def interfaces() -> list[Interface]:
    """Return the addresses of all interfaces that are up, IPv4 first, without link-local ones."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    usable = []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if name not in up or address.family not in {socket.AF_INET, socket.AF_INET6}:
                continue
            ip = ipaddress.ip_address(address.address.partition("%")[0])
            if not ip.is_link_local:
                usable.append(Interface(name, str(ip), _prefix(address.netmask, ip.max_prefixlen)))
    return sorted(usable, key=lambda interface: ":" in interface.ip)


def machine() -> str:
    """Return an identifier of this kernel and network namespace.

    Two processes with equal identifiers have the same network interfaces.
    """
    try:
        return f"{BOOT_ID.read_text().strip()}/{NAMESPACE.readlink()}"
    except OSError:  # no /proc
        return socket.gethostname()


def _prefix(netmask: str | None, whole: int) -> int:
    """Return the number of bits of a mask such as 255.255.255.0; `whole` without a valid mask."""
    if not netmask:
        return whole
    try:
        return int(ipaddress.ip_address(netmask)).bit_count()
    except ValueError:
        return whole
