"""The program that `launch_conformance` lets launchers start; it imports no torch.

python -m support.launched NAME
"""

from __future__ import annotations

import os
import signal
import sys
import time

__all__ = ["FAULT", "NUM_LINES", "main"]

FAILING = "1"  # the rank that fails
NUM_LINES = 2000
FAULT = "dataset file shard-7 is missing"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_WORLD_SIZE")


def main(what: str) -> int:
    """Do what the name says."""
    rank = os.environ["RANK"]
    if what == "places":
        print(" ".join(os.environ[name] for name in NAMES), flush=True)
        for number in range(NUM_LINES):
            print(f"line {number} of rank {rank}")
    elif what == "wait" or rank != FAILING:
        print("waits", flush=True)
        while True:
            signal.pause()
    elif what == "kill":
        time.sleep(0.1)  # the other ranks are there, as a rule
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        return 3
    elif what == "raise":
        raise ValueError(FAULT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
