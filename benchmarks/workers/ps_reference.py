"""References for a parameter server: a plain unix socket and torch's RPC echo the same bytes.

torch's RPC has threads that poll without pause. So it is started only for its measurement in each
round, and ended afterwards.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING

import torch
from torch.distributed import rpc

from braid.errors import CommError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["EchoClient", "RemoteEcho", "echo_address", "serve_echo"]

REQUEST = struct.Struct("<cQ")  # kind, and number of bytes or number of the session
ECHO, SESSION = b"e", b"s"
TIMEOUT_S = 60.0


def echo_address() -> str:
    """Return a new address of an abstract unix socket."""
    return f"braid-bench-{os.urandom(8).hex()}"


def serve_echo(listener: socket.socket, directory: str) -> None:
    """Echo the bytes of each request until the client closes.

    Args:
        listener: Listening socket.
        directory: Directory for the rendezvous of torch's RPC.
    """
    connection, _ = listener.accept()
    with connection, listener:
        memory = memoryview(bytearray())
        while head := connection.recv(REQUEST.size, socket.MSG_WAITALL):
            kind, number = REQUEST.unpack(head)
            if kind == SESSION:
                with _session("server", 1, directory, number):
                    pass
                continue
            if len(memory) != number:
                memory = memoryview(bytearray(number))
            _receive(connection, memory)
            connection.sendall(memory)


class EchoClient:
    """The client of `serve_echo`.

    Args:
        address: Address of the listener.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect("\0" + address)

    def echo(self, outgoing: memoryview, incoming: memoryview) -> None:
        """Send bytes, then receive the same number of bytes."""
        self._socket.sendall(REQUEST.pack(ECHO, len(outgoing)))
        self._socket.sendall(outgoing)
        _receive(self._socket, incoming)

    def begin_session(self, number: int) -> None:
        """Ask the server to join session `number` of torch's RPC."""
        self._socket.sendall(REQUEST.pack(SESSION, number))

    def close(self) -> None:
        """Close the connection, which ends the server."""
        self._socket.close()


class RemoteEcho:
    """A session of torch's RPC in which the server echoes tensors; a context manager.

    Args:
        client: Client that asks the server to join.
        directory: Directory for the rendezvous.
        number: Number of the session.
    """

    def __init__(self, client: EchoClient, directory: str, number: int) -> None:
        client.begin_session(number)
        self._session = _session("worker", 0, directory, number)

    def __enter__(self) -> RemoteEcho:
        self._session.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session.__exit__(kind, value, trace)

    def echo(self, tensor: torch.Tensor) -> None:
        """Send a tensor, and receive it."""
        rpc.rpc_sync("server", _same, args=(tensor,))


class _session:  # noqa: N801 - used as a function
    """Context that joins a session of torch's RPC, and leaves it together with the other rank."""

    def __init__(self, name: str, rank: int, directory: str, number: int) -> None:
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{directory}/rpc-{number}", rpc_timeout=TIMEOUT_S
        )
        self._start = name, rank, options

    def __enter__(self) -> None:
        name, rank, options = self._start
        rpc.init_rpc(  # type: ignore[no-untyped-call]
            name, rank=rank, world_size=2, rpc_backend_options=options
        )

    def __exit__(self, *exc_info: object) -> None:
        rpc.shutdown()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _receive(connection: socket.socket, memory: memoryview) -> None:
    received = 0
    while received < len(memory):
        count = connection.recv_into(memory[received:])
        if not count:
            msg = (
                f"the echo ended after {received} of {len(memory)} bytes: see the log of the server"
            )
            raise CommError(msg)
        received += count
