"""Messages of an engine's client to its launcher, as lines of JSON on stdout."""

from __future__ import annotations

import os

import msgspec

__all__ = ["FromClient"]


class FromClient(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Message of a client.

    Attributes:
        hosts: Names of nodes, with their slots.
        lost: Number of a node that is gone.
        why: Reason for its loss.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    lost: int = -1
    why: str = ""

    def send(self) -> None:
        """Send the message to the launcher."""
        os.write(1, msgspec.json.encode(self) + b"\n")
