"""Rendezvous through a file, for launchers that share a directory but know no common address.

Node 0 (the first launcher, or the one with `--node-rank 0`) publishes its addresses in the file,
and all other launchers read them. If two launchers have one number, the message names both.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

import msgspec

from braid.errors import CommTimeout, ConfigError
from braid.runtime.closing import Closing
from braid.runtime.store import FileStore

__all__ = ["FileMeeting"]

ADDRESSES = "addresses"
Published = Annotated[list[str], msgspec.Meta(min_length=1)]  # machine identifier, then addresses


class FileMeeting(Closing):
    """File through which launchers find node 0, as one launcher uses it; a context manager.

    Args:
        path: Path of the file; the first launcher creates it.
        num_nodes: Number of launchers.
        node_rank: Number of this launcher; None for the next free one.

    Attributes:
        node_rank: Number of this launcher.

    Raises:
        ConfigError: The number is taken, all numbers are taken, or the file cannot be used.
    """

    def __init__(self, path: str, num_nodes: int, node_rank: int | None) -> None:
        self._path = Path(path)
        self._store = FileStore(path)
        me = f"{socket.gethostname()} (pid {os.getpid()})"
        mine = f"{me}\n{secrets.token_hex(8)}".encode()  # containers may have equal names and pids
        try:
            if node_rank is None:
                node_rank = self._store.add("nodes", 1) - 1
            if node_rank >= num_nodes:
                msg = (
                    f"{node_rank} of {num_nodes} nodes have joined at {path} already: remove the "
                    "file if it is from an earlier run, or give all nodes the same --nnodes"
                )
                raise ConfigError(msg)
            owner = self._store.compare_set(f"node/{node_rank}", b"", mine)
            if owner != mine:
                msg = (
                    f"two nodes have --node-rank {node_rank} at {path}: "
                    f"{owner.decode().splitlines()[0]} and {me}. Give every node its own number, "
                    "or remove the file if it is from an earlier run"
                )
                raise ConfigError(msg)
        except BaseException:
            self._store.close()
            raise
        self.node_rank = node_rank

    def publish(self, addresses: list[str]) -> None:
        """Write the machine identifier and the addresses of node 0 to the file."""
        self._store.set(ADDRESSES, msgspec.json.encode(addresses))

    def find(self, timeout_s: float) -> list[str]:
        """Wait for the machine identifier and the addresses of node 0, and return them.

        Raises:
            ConfigError: Node 0 has not published its addresses within the time-out.
        """
        try:
            self._store.wait([ADDRESSES], timeout_s)
            return msgspec.json.decode(self._store.get(ADDRESSES), type=Published)
        except (CommTimeout, msgspec.MsgspecError) as exc:
            msg = (
                f"node 0 has not published its addresses in {self._path} within {timeout_s:g} s: "
                "start node 0, and check that all nodes share the directory"
            )
            raise ConfigError(msg) from exc

    def remove(self) -> None:
        """Remove the file, so that the next run can use its name."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._store.close()
