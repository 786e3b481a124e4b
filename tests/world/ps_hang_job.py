"""A parameter server that stands still until its report has come, in the way that is asked for."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import braid
from braid import ps
from braid.ps.messages import Barrier


def until_reported(folder: Path) -> None:
    """Compute until the launcher has written a report."""
    while not list(folder.glob("hang-*.txt")):
        time.sleep(0.05)


def loop(folder: Path, handle: Any, delivery: Any) -> None:
    """Handle a message after a report only."""
    until_reported(folder)
    handle(delivery)


if __name__ == "__main__":
    way, folder = sys.argv[1], Path(sys.argv[2])
    with ps.join(braid.init()) as node:
        table = node.dense("w", torch.zeros(4), partial(torch.optim.SGD, lr=1.0))
        if node.role == "scheduler" and way in {"scheduler_loops", "scheduler_stopped"}:
            (folder / "pid").write_text(str(os.getpid()))
            office = node.postoffice
            if way == "scheduler_loops":
                handlers = office._handlers
                handlers[Barrier] = partial(loop, folder, handlers[Barrier])
        if not node.is_worker:
            node.serve()
            sys.exit()
        for step in range(3):
            if step == 2 and node.number == 1 and way in {"pull", "push"}:
                until_reported(folder)
            stamp = table.push(torch.ones(4))
            if way == "push":
                table.wait(stamp)
            table.pull()
        if node.number == 1 and way == "barrier":
            until_reported(folder)
        if node.number == 0 and way == "scheduler_stopped":
            os.kill(int((folder / "pid").read_text()), signal.SIGSTOP)
        node.barrier("end")
