"""Descriptors passed over a socket, for hosts that forbid `/proc/<pid>/fd`.

In containers with separate pid namespaces and on hardened kernels, a process cannot open the
descriptors of another process. The usual alternative is SCM_RIGHTS: a unix socket passes a
duplicate of a descriptor to the other process. Each rank runs one thread that sends descriptors on
request to processes of the same user (SO_PEERCRED), on an abstract socket that leaves no file
behind.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from braid.errors import CommError, PeerLostError
from braid.runtime.transport.memory import RootAddress

__all__ = ["DescriptorService", "open_through_services"]

_QUESTION = struct.Struct("=i")
_CREDENTIALS = struct.Struct("=3i")
_TIMEOUT_S = 10.0


class DescriptorService:
    """Sends descriptors of this process to its peers; owns one thread.

    Args:
        rank: For the thread's name.
    """

    def __init__(self, rank: int) -> None:
        self.name = f"braid-fd-{secrets.token_hex(12)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(64)
        self._thread = threading.Thread(
            target=self._serve, name=f"braid-transport-{rank}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop answering and join the thread."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return  # closed
            with client:
                self._answer(client)

    @staticmethod
    def _answer(client: socket.socket) -> None:
        client.settimeout(_TIMEOUT_S)
        if not _is_of_same_user(client):
            return
        try:
            (number,) = _QUESTION.unpack(client.recv(_QUESTION.size))
            if str(Path(f"/proc/self/fd/{number}").readlink()).startswith(
                ("/memfd:braid-", "pipe:")
            ):
                socket.send_fds(client, [b"+"], [number])
        except (OSError, struct.error):
            return  # the peer died or sent an invalid request: it gets an end of file


def _is_of_same_user(peer: socket.socket) -> bool:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())


def open_through_services(
    addresses: dict[int, RootAddress], services: dict[int, str]
) -> Callable[[int, int, int], int]:
    """Return a function that opens descriptors of peers through their `DescriptorService`.

    Args:
        addresses: Root address of each rank.
        services: Name of each rank's service.
    """

    def open_fd(rank: int, number: int, _flags: int) -> int:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(_TIMEOUT_S)
                client.connect(f"\0{services[rank]}")
                fds: list[int] = []
                if _is_of_same_user(client):  # another user may have written the name to the store
                    client.sendall(_QUESTION.pack(number))
                    _, fds, _, _ = socket.recv_fds(client, 1, 1)
        except OSError as exc:
            msg = (
                f"rank {rank} (pid {addresses[rank].pid}) is gone: its descriptor service does "
                "not answer"
            )
            raise PeerLostError(msg, rank=rank) from exc
        if not fds:
            msg = (
                f"rank {rank} (pid {addresses[rank].pid}) refused to share file descriptor "
                f"{number}: run all ranks as the same user"
            )
            raise CommError(msg)
        return fds[0]

    return open_fd
