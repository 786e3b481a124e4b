"""The network interfaces of this host, and how to tell whether two processes share them.

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
    """An address of this host.

    Attributes:
        name: Name of the interface.
        ip: Address.
        prefix: Bits of the address that are those of its network.
    """

    name: str
    ip: str
    prefix: int


def interfaces() -> list[Interface]:
    """All addresses of interfaces that are up; IPv4 before IPv6, which link-local ones are left out of."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if name not in up or address.family not in {socket.AF_INET, socket.AF_INET6}:
                continue
            ip = ipaddress.ip_address(address.address.partition("%")[0])
            if not ip.is_link_local:
                found.append(Interface(name, str(ip), _prefix(address.netmask, ip.max_prefixlen)))
    return sorted(found, key=lambda interface: ":" in interface.ip)


def machine() -> str:
    """Equal for two processes that have the same interfaces: the same kernel and network namespace."""
    try:
        return f"{BOOT_ID.read_text().strip()}/{NAMESPACE.readlink()}"
    except OSError:  # no /proc
        return socket.gethostname()


def _prefix(netmask: str | None, whole: int) -> int:
    """Bits of a mask such as 255.255.255.0 or ffff:ffff::; the whole address when there is none."""
    if not netmask:
        return whole
    try:
        return int(ipaddress.ip_address(netmask)).bit_count()
    except ValueError:
        return whole
