"""A call that waits for a call that waits for longer than a report of a hang does."""

from __future__ import annotations

import os
import time
from typing import Any

from braid import rpc
from braid.rpc import membership
from braid.runtime.rendezvous.launcher_link import LauncherLink, open_link


def open_link_late(*args: Any) -> LauncherLink:
    """Open the link to the launcher so late that calls might come before."""
    time.sleep(0.5 * rank)
    return open_link(*args)


def slow(seconds: float) -> float:
    """Take some time."""
    time.sleep(seconds)
    return seconds


def relay(seconds: float) -> float:
    """Let the last node take some time."""
    return rpc.rpc_sync("w2", slow, (seconds,))


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    membership.open_link = open_link_late
    rpc.init_rpc(f"w{rank}")
    if rank == 0:
        for seconds in (5.0, 0.0, 0.0):
            rpc.rpc_sync("w1", relay, (seconds,))
    rpc.shutdown()
