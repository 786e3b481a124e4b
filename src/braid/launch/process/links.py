"""Observes the connections of a rank to other hosts, from the kernel.

Problem: when a network link is down, or carries packets one way only, all ranks wait and none of
them is at fault. Only the kernel knows that what was sent is not acknowledged.

Idea: `sock_diag` lists the TCP connections of this network namespace, to any user: their timers,
the number of times that something was sent again in vain, and the number of segments that came in.
A change of that number is a sign of life of the other host, even where its own acknowledgements are
lost.

Source: sock_diag(7); `struct inet_diag_msg` of linux/inet_diag.h, `struct tcp_info` of linux/tcp.h.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from braid.runtime.diagnose.hang_view import LinkView

__all__ = ["LinkObserver"]

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY, NLMSG_ERROR, NLMSG_DONE = 20, 2, 3
NLM_F_REQUEST_DUMP = 0x301
INET_DIAG_INFO = 2
ESTABLISHED = 1
HEADER = struct.Struct("=IHHII")
REQUEST = struct.Struct("=BBBxI48x")
MESSAGE = struct.Struct("=4BHH16s16s28xI")  # see `inet_diag_msg`
ATTRIBUTE = struct.Struct("=HH")
LAST_RECEIVED_AT = 52  # of tcp_info: milliseconds since the last data, and the last acknowledgement
SEGMENTS_IN_AT = 140
REPLY_BYTES = 1 << 18


class _TcpSocket(NamedTuple):
    """A TCP connection.

    Attributes:
        local: Address of this end.
        peer: Address of the other end.
        ports: Ports of both ends.
        inode: Number by which processes refer to it.
        num_repeats: Number of times that something was sent again, or probed, without an answer.
        idle_ms: Milliseconds since the last data or acknowledgement.
        num_segments: Number of segments that have come in.
    """

    local: str
    peer: str
    ports: tuple[int, int]
    inode: int
    num_repeats: int
    idle_ms: int
    num_segments: int


class LinkObserver:
    """Observes the connections of one process to other hosts.

    Args:
        pid: Process on this host and in this network namespace.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._changed: dict[tuple[str, str, int, int], tuple[int, int]] = {}  # segments, time
        self._links: tuple[LinkView, ...] = ()

    def look(self, now_ns: int) -> tuple[LinkView, ...]:
        """Return one view for each pair of addresses; none if the kernel reports no connections."""
        links: dict[tuple[str, str], LinkView] = {}
        inodes = _inodes_of(self._pid)
        for one in _sockets():
            if one.inode not in inodes or ipaddress.ip_address(one.peer).is_loopback:
                continue
            key = (one.local, one.peer, *one.ports)
            num, at_ns = self._changed.get(key, (-1, 0))
            if num < 0:
                at_ns = now_ns - one.idle_ms * 1_000_000
            elif num != one.num_segments:
                at_ns = now_ns
            self._changed[key] = (one.num_segments, at_ns)
            known = links.get((one.local, one.peer), LinkView(one.local, one.peer, 0, 0))
            links[one.local, one.peer] = known._replace(
                received_ns=max(known.received_ns, at_ns),
                num_repeats=max(known.num_repeats, one.num_repeats),
            )
        return tuple(links.values())


def _inodes_of(pid: int) -> set[int]:
    """Return the numbers of the sockets that a process has open."""
    inodes = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    inodes.add(int(target[8:-1]))
    return inodes


def _sockets() -> list[_TcpSocket]:
    """Return all established TCP connections; none without `sock_diag`."""
    if sys.platform != "linux":
        return []
    sockets = []
    for family in (socket.AF_INET, socket.AF_INET6):
        with (
            suppress(OSError, struct.error),
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink,
        ):
            netlink.settimeout(1.0)
            extensions = 1 << (INET_DIAG_INFO - 1)
            request = REQUEST.pack(family, socket.IPPROTO_TCP, extensions, 1 << ESTABLISHED)
            length = HEADER.size + len(request)
            head = HEADER.pack(length, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST_DUMP, 1, 0)
            netlink.send(head + request)
            sockets += [_parsed(family, message) for message in _messages(netlink)]
    return sockets


def _messages(netlink: socket.socket) -> Iterator[bytes]:
    """Yield the messages of one dump."""
    while True:
        data = netlink.recv(REPLY_BYTES)
        while len(data) >= HEADER.size:
            length, kind, *_ = HEADER.unpack_from(data)
            if kind in {NLMSG_DONE, NLMSG_ERROR} or length < HEADER.size:
                return
            yield data[HEADER.size : length]
            data = data[length + 3 & ~3 :]


def _parsed(family: int, message: bytes) -> _TcpSocket:
    _, _, _, num_repeats, source, target, local, peer, inode = MESSAGE.unpack_from(message)
    idle_ms = num_segments = 0
    rest = message[MESSAGE.size :]
    while len(rest) >= ATTRIBUTE.size:
        length, kind = ATTRIBUTE.unpack_from(rest)
        if length < ATTRIBUTE.size:
            break
        info = rest[ATTRIBUTE.size : length]
        if kind == INET_DIAG_INFO and len(info) >= SEGMENTS_IN_AT + 4:
            idle_ms = min(struct.unpack_from("=II", info, LAST_RECEIVED_AT))
            (num_segments,) = struct.unpack_from("=I", info, SEGMENTS_IN_AT)
        rest = rest[length + 3 & ~3 :]
    size = 4 if family == socket.AF_INET else 16
    return _TcpSocket(
        socket.inet_ntop(family, local[:size]),
        socket.inet_ntop(family, peer[:size]),
        (socket.ntohs(source), socket.ntohs(target)),
        inode,
        num_repeats,
        idle_ms,
        num_segments,
    )
