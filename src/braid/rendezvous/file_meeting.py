"""Meeting through a file: launchers that share a directory and know nothing of each other's addresses.

The first that comes, or the one that was told so, is node 0 and leaves its addresses; the others
read them. A number that is taken twice is noticed by both, and by whom.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Annotated

import msgspec

from braid.errors import CommTimeout, ConfigError
from braid.store import FileStore

__all__ = ["FileMeeting"]

ADDRESSES = "addresses"
Published = Annotated[list[str], msgspec.Meta(min_length=1)]  # a machine and its addresses


class FileMeeting:
    """One launcher's view of the file; a context manager.

    Args:
        path: The file; made new by whoever comes first.
        num_nodes: Number of launchers.
        node_rank: Number of this one; None to take the next.

    Attributes:
        node_rank: Number of this launcher.

    Raises:
        ConfigError: The number is taken, all numbers are taken, or the file cannot be used.
    """

    def __init__(self, path: str, num_nodes: int, node_rank: int | None) -> None:
        self._path = Path(path)
        self._store = FileStore(path)
        me = f"{socket.gethostname()} (pid {os.getpid()})"
        mine = f"{me}\n{secrets.token_hex(8)}".encode()  # containers may agree in name and number
        try:
            if node_rank is None:
                node_rank = self._store.add("nodes", 1) - 1
            if node_rank >= num_nodes:
                msg = (
                    f"expected {num_nodes} nodes at {path}, found that {node_rank} have come "
                    "before: "
                    "remove the file if it is of an earlier run, or give all nodes the same "
                    "--nnodes"
                )
                raise ConfigError(msg)
            owner = self._store.compare_set(f"node/{node_rank}", b"", mine)
            if owner != mine:
                msg = (
                    f"expected one node with --node-rank {node_rank} at {path}, found "
                    f"{owner.decode().splitlines()[0]} "
                    f"and {me}: give every node its own, or remove the file if it is of an "
                    "earlier run"
                )
                raise ConfigError(msg)
        except BaseException:
            self._store.close()
            raise
        self.node_rank = node_rank

    def publish(self, found: list[str]) -> None:
        """Leave the machine of node 0 and its addresses."""
        self._store.set(ADDRESSES, msgspec.json.encode(found))

    def find(self, timeout_s: float) -> list[str]:
        """Wait for the machine of node 0 and its addresses.

        Raises:
            ConfigError: It has not come in time.
        """
        try:
            self._store.wait([ADDRESSES], timeout_s)
            return msgspec.json.decode(self._store.get(ADDRESSES), type=Published)
        except (CommTimeout, msgspec.MsgspecError) as exc:
            msg = (
                f"expected node 0 to leave its addresses in {self._path} within {timeout_s:g} s, "
                "found "
                "none: start it, and see whether all nodes share that directory"
            )
            raise ConfigError(msg) from exc

    def remove(self) -> None:
        """Remove the file, so that the next run may use its name."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._store.close()

    def __enter__(self) -> FileMeeting:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
