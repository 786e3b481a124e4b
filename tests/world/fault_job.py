"""The job of the fault trials: steps of the usual phases, joined by a barrier, with a scripted fault.

`python fault_job.py "kill rank=1 step=3 in=backward"`
"""

from __future__ import annotations

import sys

from launch_jobs import Rank

from support.faults import FaultScript

NUM_STEPS = 20


def main(faults: str) -> None:
    rank = Rank()
    events = rank.events
    FaultScript.from_text(faults).arm(rank.env.rank, events)
    for step in range(NUM_STEPS):
        with events.span("step", seq=step):
            with events.span("forward"):
                pass
            with events.span("backward"):
                for bucket in range(2):
                    with events.span(f"bucket {bucket} of 2"):
                        rank.barrier(2 * step + bucket)
            with events.span("optimizer"):
                pass


if __name__ == "__main__":
    main(sys.argv[1])
