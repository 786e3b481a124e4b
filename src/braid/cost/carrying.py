"""What an algorithm costs when it is carried out on tensors, in pieces or pipelined.

Two ways in which the engine departs from rounds of messages:

    a program       goes through the tensor in pieces, each with a step of all ranks around it
    a pipeline      cuts it into chunks, several on their way: the slowest resource sets the pace

        fill                       |  one chunk per period                        |
        near | far        | out    |
               near | far          | out
                      near         |     far     | out

Per chunk a stage needs its latency, in which nothing is busy, and work, in which its resource is.
With D chunks under way besides the one that is begun, the period is the longest of: the work of any
one resource, and all of a chunk's way over D + 1.

Source: for the pipeline, the bound of software pipelining: M. Lam, PLDI (1988), sec. 2 (resources
and recurrences).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from braid.errors import ConfigError
from braid.schedule import Program, simulate
from braid.schedule.collective import collective_costs
from braid.topology import Cluster, Level

__all__ = ["Phase", "hierarchical_s", "pipelined_s", "program_s"]


class Phase(NamedTuple):
    """What one chunk needs on its way, one phase after the other.

    Attributes:
        resource: What is busy, such as the card or the processor.
        work_s: For how long.
        latency_s: Before that, while nothing is.
    """

    resource: str
    work_s: float
    latency_s: float = 0.0


def program_s(
    written: Program,
    nbytes: int,
    cluster: Cluster,
    *,
    sync_s: float,
    piece_bytes: int,
    sum_s_per_byte: float = 0.0,
) -> float:
    """Return the seconds of a program that goes through the tensor in pieces.

    A rank sends without asking whether anybody waits for it, so what it sends in one round and in
    the next may share its link: a tree whose root sends to two takes as long as its link needs for
    both.

    Args:
        written: The program.
        nbytes: l, bytes of the largest full buffer of a rank.
        cluster: Network.
        sync_s: Seconds of one such step.
        piece_bytes: Of the largest piece.
        sum_s_per_byte: c, seconds per byte that is added up.
    """
    whole, rest = divmod(nbytes, piece_bytes)
    pieces = [(piece_bytes, whole), (rest, 1 if rest or not nbytes else 0)]
    seconds = 0.0
    for size, count in pieces:
        if count:
            costs = collective_costs(written, size, sum_s_per_byte)
            once = simulate(written, costs, cluster, buffered=True).seconds
            seconds += count * (2 * sync_s + once)
    return seconds


def pipelined_s(phases: Sequence[Phase], num_chunks: int, depth: int) -> float:
    """Seconds until the last chunk has gone through all phases.

    Args:
        phases: Of one chunk, in order.
        num_chunks: Number of equal chunks.
        depth: Chunks under way besides the one that is begun.
    """
    if num_chunks < 1 or depth < 0:
        msg = (
            f"expected at least one chunk and a depth that is not negative, found {num_chunks} "
            f"and {depth}"
        )
        raise ConfigError(msg)
    busy: dict[str, float] = defaultdict(float)
    for phase in phases:
        busy[phase.resource] += phase.work_s
    way = sum(phase.latency_s + phase.work_s for phase in phases)
    period = max([*busy.values(), way / (depth + 1)], default=0.0)
    return way + (num_chunks - 1) * period


def hierarchical_s(
    nbytes: int,
    cluster: Cluster,
    *,
    sync_s: float,
    chunk_bytes: int,
    depth: int,
    copy_s_per_byte: float,
    sum_s_per_byte: float,
) -> float:
    """Seconds of the all-reduce over hosts in lanes (`comm.hierarchical`).

    Args:
        nbytes: l, bytes of the tensor.
        cluster: The last level is the network between hosts; one below it, if there is one, is a
            host's memory.
        sync_s: Seconds of a step of all ranks.
        chunk_bytes: Of one chunk.
        depth: Chunks on the wire besides the one that is summed.
        copy_s_per_byte: Of a copy in memory.
        sum_s_per_byte: Of an addition.
    """
    network = cluster.levels[-1]
    mates = cluster.num_ranks // network.size
    hosts = network.size
    chunk = min(nbytes, chunk_bytes)
    lane = chunk / mates
    exchanges = 1 if hosts == 2 else 2
    sent = lane if hosts == 2 else lane * (hosts - 1) / hosts  # by a lane, in one exchange
    near_s = cluster.levels[0].latency_s if mates > 1 else 0.0
    copied = chunk + chunk * (mates - 1) / mates if mates > 1 else 0.0
    added = lane * (mates - 1) + lane * (hosts - 1) / (1 if hosts == 2 else hosts)
    phases = [Phase("memory", copied * copy_s_per_byte + added * sum_s_per_byte, 2 * near_s)]
    # who exchanges waits for all twins, not for one: that is a step, not a message
    phases += [Phase("card", _shared_s(network, sent, mates), sync_s)] * exchanges
    return sync_s + pipelined_s(phases, max(1, -(-nbytes // max(1, chunk))), depth)


def _shared_s(level: Level, nbytes: float, at_once: int) -> float:
    """Seconds of work of a message that shares its link with others like it."""
    most = float(level.most(np.array([nbytes]))[0])
    return nbytes * max(1 / most, at_once / level.bytes_per_s)
