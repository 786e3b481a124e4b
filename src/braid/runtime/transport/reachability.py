"""Tests which hosts can reach each other, before connections are made.

Problem: a firewall, a wrong interface or an address of another network appears as a time-out of
some rank, minutes later, and the message does not mention the other ranks.

Idea: one rank of each host tries the addresses of all ranks of other hosts in parallel, for a few
seconds. The results are gathered, and all ranks report the same table.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Mapping

from braid.runtime.clock import Clock
from braid.runtime.diagnose.reach_table import why_unreachable
from braid.runtime.wire import Address

__all__ = ["PROBE_LIMIT_S", "own_address_towards", "probe"]

PROBE_LIMIT_S = 5.0


def probe(
    addresses: Mapping[int, str], clock: Clock, *, timeout_s: float = PROBE_LIMIT_S
) -> dict[int, str]:
    """Try to connect to all `addresses` at the same time.

    Returns:
        For each address that cannot be reached, the reason in one or two words.
    """
    failed: dict[int, str] = {}
    waiting: dict[int, tuple[int, socket.socket]] = {}
    poller = select.poll()
    for key, address in addresses.items():
        try:
            family, where = Address.parse(address).resolve()
        except OSError:
            failed[key] = "name unknown"
            continue
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as exc:  # no descriptor is free: not an error of the network
            failed[key] = why_unreachable(exc.errno or 0)
            continue
        sock.setblocking(False)
        code = sock.connect_ex(where)
        if code in {0, errno.EINPROGRESS}:
            waiting[sock.fileno()] = (key, sock)
            poller.register(sock, select.POLLOUT)
        else:
            failed[key] = why_unreachable(code)
            sock.close()
    deadline_ns = clock.after_ns(timeout_s)
    while waiting:
        ready = poller.poll(max(0.0, (deadline_ns - clock.now_ns()) / 1e6))
        for fd, _ in ready:
            key, sock = waiting.pop(fd)
            poller.unregister(fd)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                failed[key] = why_unreachable(code)
            sock.close()
        if not ready:
            break
    for key, sock in waiting.values():
        failed[key] = "timed out"
        sock.close()
    return failed


def own_address_towards(host: str) -> str:
    """Return the address of this host on the network of `host`; sends no packet.

    Raises:
        OSError: There is no route to the host, or its name is unknown.
    """
    family, where = Address(host=host, port=9).resolve()
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(where)
        return str(sock.getsockname()[0])
