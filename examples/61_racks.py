"""An all-reduce on two racks of two ranks: which algorithm sends least over the link of a rack?

braid run -n 4 examples/61_racks.py
"""

from __future__ import annotations

import torch

import braid
from braid.comm import Group
from braid.programs.schedule import simulate
from braid.programs.schedule.collective import algorithm, collective_costs, program
from braid.programs.topology import Cluster, Level

RACK = 2  # ranks of a rack
NUMBERS = 1 << 16


def grid(group: Group, x: torch.Tensor) -> torch.Tensor:
    """All-reduce along racks and across them, with collectives of sub-groups."""
    row = group.split(color=group.rank // RACK)
    column = group.split(color=group.rank % RACK)
    part = row.reduce_scatter(x)  # inside of a rack: this rank's share of the sum
    column.all_reduce(part)  # across racks: only this share
    return row.all_gather(part)  # inside of a rack


def crossing(name: str, nbytes: int) -> tuple[float, float]:
    """Return bytes over the busiest link of a rack, and milliseconds, by simulation."""
    racks = Cluster(
        [
            Level(name="rack", size=RACK, latency_s=5e-6, bytes_per_s=25e9),
            Level(name="spine", size=2, latency_s=10e-6, bytes_per_s=12.5e9),  # 4 : 1
        ]
    )
    row = RACK if name == "hierarchical" else 1
    made = program(algorithm(name, "all_reduce", racks.num_ranks, row=row))
    timeline = simulate(made, collective_costs(made, nbytes), racks)
    links = timeline.link_bytes.items()
    busiest = max(sent for link, sent in links if racks.level_of_link(link).name == "spine")
    return busiest, timeline.seconds * 1e3


def main() -> None:
    group = braid.init()
    everybody = [
        torch.randint(-99, 99, (NUMBERS,), generator=torch.Generator().manual_seed(rank)).float()
        for rank in range(group.size)
    ]  # whole numbers: sums do not depend on their order
    x, alone = everybody[group.rank], sum(everybody)
    results = {
        "ring": group.all_reduce(x.clone(), algorithm="ring"),
        "halving_doubling": group.all_reduce(x.clone(), algorithm="halving_doubling"),
        "hierarchical": grid(group, x.clone()),
    }
    for name, result in results.items():
        nbytes, ms = crossing(name, x.nbytes)
        assert torch.equal(result, alone), name
        if group.rank == 0:
            print(f"{name:18}{nbytes / x.nbytes:g} x the tensor over a rack's link, {ms:.3f} ms")
    if group.rank == 0:
        print("all sums equal one process, bit by bit")


if __name__ == "__main__":
    main()
