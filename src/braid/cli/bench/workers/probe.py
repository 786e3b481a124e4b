"""One rank of `braid probe`: times messages by size, for each level of the cluster.

One rank for each child of a unit (`topology.places`) sends to another in pairs, all pairs at the
same time, there and back. Half of that time is one message in one direction. The largest message is
also sent in both directions at the same time, which shows whether a link is full duplex.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import torch

from braid.cli.bench.harness.turns import in_turns
from braid.comm import Group
from braid.context import init, membership, shutdown
from braid.errors import ConfigError
from braid.programs.topology import LEVEL_NAMES, Rings, cpus_of, node_of, rings

__all__ = [
    "LONG_BYTES",
    "REST_S",
    "MeasuredLevel",
    "ProbePlan",
    "Probed",
    "main",
    "measured",
    "message_runs",
    "rested_of",
    "stand",
]

NODES = Path("/sys/devices/system/node")
REST_S = 3e-3  # time in which a token bucket of a fast network fills
LONG_BYTES = 64 << 10  # size from which a message can drain a bucket
SMALL_BYTES = 4  # size of a message that measures latency


class ProbePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        sizes: Bytes of messages.
        rounds: Number of turns through all sizes.
        pin: Whether ranks stay on the processors of one NUMA node.
    """

    sizes: tuple[int, ...]
    rounds: int
    pin: bool = True


class MeasuredLevel(msgspec.Struct, kw_only=True):
    """Measured latency and bandwidth of one level of the cluster.

    Attributes:
        name: Name of a unit of the level, such as a host.
        size: Number of units of the next lower level in each unit.
        latency_s: Seconds of the smallest message.
        seconds: Seconds of a message, by its bytes.
        both_ways_s: Seconds of the largest message while another one is sent in the other
            direction.
    """

    name: str
    size: int
    latency_s: float
    seconds: dict[int, float]
    both_ways_s: float


class Probed(msgspec.Struct, kw_only=True):
    """Measured levels, from the ranks upwards."""

    levels: list[MeasuredLevel]


def main(plan: ProbePlan) -> Iterator[Probed]:
    """Measure; rank 0 yields the figures."""
    group = init()
    levels = stand(group, pin=plan.pin)
    runs = message_runs(group, levels, plan.sizes)
    rested = rested_of(levels, plan.sizes)
    times = in_turns(group, runs, plan.rounds, rest_s=REST_S, rested=rested)
    if group.rank == 0:
        yield measured(levels, plan.sizes, times)
    shutdown()


def stand(group: Group, *, pin: bool) -> list[Rings]:
    """Return the pairs of ranks that send to each other, by level; pin this rank if `pin`.

    Args:
        group: Group of all ranks.
        pin: Whether to stay on the processors of one NUMA node.
    """
    hosts = membership().transport.hosts
    mine = [rank for rank in range(group.size) if hosts[rank] == hosts[group.rank]]
    nodes = _nodes() if pin else []
    node = node_of(mine.index(group.rank), len(mine), len(nodes))
    if len(nodes) > 1:
        try:
            psutil.Process().cpu_affinity(list(nodes[node]))
        except (
            OSError,
            ValueError,
            AttributeError,
        ) as exc:  # a container may forbid these processors
            msg = (
                f"rank {group.rank} cannot be bound to the processors {nodes[node]} of NUMA node "
                f"{node}: {exc}; use --no-pin"
            )
            raise ConfigError(msg) from exc
    place = torch.tensor([hosts[group.rank], node])
    places = group.all_gather(place).view(-1, 2).tolist()
    return rings([(host, node) for host, node in places])


def _nodes() -> list[tuple[int, ...]]:
    """Return the usable processors of each NUMA node with any."""
    allowed = set(os.sched_getaffinity(0))
    nodes = [
        tuple(cpu for cpu in cpus_of(file.read_text()) if cpu in allowed)
        for file in sorted(NODES.glob("node[0-9]*/cpulist"))
    ]
    return [cpus for cpus in nodes if cpus]


def message_runs(
    group: Group, levels: list[Rings], sizes: tuple[int, ...]
) -> dict[str, Callable[[], object]]:
    """Return functions that send messages of each level and size, there and back.

    Args:
        group: Group of all ranks.
        levels: Pairs of ranks that send to each other, by level.
        sizes: Bytes of messages.
    """
    runs: dict[str, Callable[[], object]] = {}
    for level in levels:
        ring = next((ring for ring in level.rings if group.rank in ring), ())
        for size in (SMALL_BYTES, *sizes):
            tensors = torch.zeros(size // 4), torch.zeros(size // 4)
            runs[f"{level.name} {size}"] = partial(_there_and_back, group, ring, *tensors)
            if size == sizes[-1]:
                runs[f"{level.name} both ways"] = partial(_both_ways, group, ring, *tensors)
    return runs


def rested_of(levels: list[Rings], sizes: tuple[int, ...]) -> list[str]:
    """Return the names of messages that are sent after a rest: long ones over a network."""
    remote = [level.name for level in levels if level.name == LEVEL_NAMES[-1]]
    return [f"{name} {size}" for name in remote for size in sizes if size >= LONG_BYTES]


def measured(levels: list[Rings], sizes: tuple[int, ...], times: dict[str, list[float]]) -> Probed:
    """Return the medians of the times, by level."""
    medians = {name: statistics.median(every) for name, every in times.items()}
    levels_ = [
        MeasuredLevel(
            name=level.name,
            size=level.size,
            latency_s=medians[f"{level.name} {SMALL_BYTES}"] / 2,
            seconds={size: medians[f"{level.name} {size}"] / 2 for size in sizes},
            both_ways_s=medians[f"{level.name} both ways"],
        )
        for level in levels
    ]
    return Probed(levels=levels_)


def _there_and_back(
    group: Group, ring: tuple[int, ...], sent: torch.Tensor, received: torch.Tensor
) -> None:
    """Send a message from every even place of a ring to the next place, and an equal one back."""
    at = ring.index(group.rank) if group.rank in ring else -1
    if at % 2 and at > 0:
        group.recv(received, ring[at - 1])
        group.send(sent, ring[at - 1])
    elif 0 <= at < len(ring) - 1:
        group.send(sent, ring[at + 1])
        group.recv(received, ring[at + 1])


def _both_ways(
    group: Group, ring: tuple[int, ...], sent: torch.Tensor, received: torch.Tensor
) -> None:
    """Send both messages of a pair at the same time."""
    at = ring.index(group.rank) if group.rank in ring else -1
    if at < 0 or (at == len(ring) - 1 and not at % 2):
        return
    peer = ring[at - 1] if at % 2 else ring[at + 1]
    with group.coalesce() as batch:
        batch.recv(received, peer)
        batch.send(sent, peer)
    batch.work.wait()
