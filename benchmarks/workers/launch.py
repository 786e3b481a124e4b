"""A rank of `launch`: it takes one step; then one rank is killed and the others notice.

All ranks are on one machine with one clock, and print JSON lines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from braid import context
from braid.errors import CommError

__all__ = ["main"]

STEPS = 50
VICTIM = 1


def main(kills: bool) -> None:
    """Run one rank; with `kills`, one rank kills itself after some steps."""
    group = context.init()
    x = torch.ones(1024)
    group.all_reduce(x)
    print(json.dumps({"first_step": time.time()}), flush=True)
    if not kills:
        context.shutdown()
        return
    try:
        for step in range(1 << 30):
            group.all_reduce(x)
            if step == STEPS and group.rank == VICTIM:
                print(json.dumps({"killed": time.time()}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
    except CommError:
        print(json.dumps({"noticed": time.time()}), flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1] == "kill")
