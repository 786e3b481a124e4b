"""One rank of `braid probe`: how long messages between the ranks of this host take, by size.

Every rank sends to the next and receives from the one before it, all at the same time: what each link gives while the others are busy, too, is
what the rounds of collectives find.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import msgspec
import torch

from braid.comm import Group
from braid.context import init, shutdown

__all__ = ["Plan", "Probed", "main"]

MOST_ROUNDS = 300  # of small messages, whose times vary most
SAME_WORK_BYTES = 1 << 27
SMALL_BYTES = 4  # of the message whose time is all latency


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        sizes: Bytes of messages.
        rounds: Of each size, at least; small ones are repeated more often.
        out: File for the figures, written by rank 0.
    """

    sizes: tuple[int, ...]
    rounds: int
    out: str


class Probed(msgspec.Struct, kw_only=True):
    """What was measured.

    Attributes:
        latency_s: Median seconds of the smallest message; of the slowest rank.
        seconds: Median seconds of a message, by its bytes; of the slowest rank.
    """

    latency_s: float
    seconds: dict[int, float]


def main(plan: Plan) -> None:
    """Measure; rank 0 writes the file."""
    torch.set_num_threads(1)
    group = init()
    sizes = (SMALL_BYTES, *plan.sizes)
    found = []
    for size in sizes:
        sent, received = torch.zeros(size // 4), torch.zeros(size // 4)
        _exchange(group, sent, received)  # slots are made when they are first needed
        rounds = max(plan.rounds, min(MOST_ROUNDS, SAME_WORK_BYTES // size))
        found.append(statistics.median(_exchange(group, sent, received) for _ in range(rounds)))
    medians = torch.tensor(found, dtype=torch.float64)
    latency_s, *slowest = group.all_reduce(medians, "max").tolist()
    if group.rank == 0:
        probed = Probed(latency_s=latency_s, seconds=dict(zip(plan.sizes, slowest, strict=True)))
        Path(plan.out).write_bytes(msgspec.json.encode(probed))
    shutdown()


def _exchange(group: Group, sent: torch.Tensor, received: torch.Tensor) -> float:
    """Seconds of a message to the next rank while one comes from the rank before."""
    group.barrier()
    start = time.perf_counter()
    with group.coalesce() as batch:
        batch.recv(received, (group.rank - 1) % group.size)
        batch.send(sent, (group.rank + 1) % group.size)
    batch.work.wait()
    return time.perf_counter() - start


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(msgspec.json.decode(sys.argv[1], type=Plan))
