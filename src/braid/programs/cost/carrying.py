"""Cost of an algorithm on tensors, which the engine handles in pieces or in a pipeline.

Two ways in which the engine departs from rounds of messages:

    a program       goes through the tensor in pieces, each with a step of all ranks around it
    a pipeline      cuts it into chunks, several on their way: the slowest resource sets the pace

        fill                       |  one chunk per period                        |
        memory | card | memory     |
               memory | card       | memory
                      memory       |     card     | memory

Per chunk a stage needs its latency, in which nothing is busy, and work, in which its resource is.
With D chunks under way besides the one that is begun, the period is the longest of: the work of any
one resource, and the whole way of a chunk over D + 1.

Source: for the pipeline, the bound of software pipelining: M. Lam, PLDI (1988), sec. 2 (resources
and recurrences).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from braid.errors import ConfigError
from braid.programs.schedule import Program, simulate
from braid.programs.schedule.collective import collective_costs
from braid.programs.topology import Cluster, Level

__all__ = ["Phase", "hierarchical_s", "pipelined_s", "program_s"]


class Phase(NamedTuple):
    """One phase in the processing of a chunk: a latency, then work on one resource.

    Attributes:
        resource: Name of the busy resource, such as the card or the processor.
        work_s: Seconds for which the chunk keeps the resource busy.
        latency_s: Seconds before the work, in which no resource is busy.
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
    """Return the seconds of a collective that runs a program on one piece of a tensor at a time.

    A rank sends without waiting for the receiver, so its messages of two rounds may share its link.
    If the root of a tree sends to two peers, both messages use its link.

    Args:
        written: Program of the collective.
        nbytes: l, bytes of the largest full buffer of a rank.
        cluster: Network that connects the ranks.
        sync_s: Seconds of one synchronization of all ranks.
        piece_bytes: Size of the largest piece.
        sum_s_per_byte: c, seconds to add up one byte.
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
    """Return the seconds until a pipeline has processed all chunks in all phases.

    Args:
        phases: Phases of one chunk, in order.
        num_chunks: Number of equal chunks.
        depth: Number of chunks that may be in progress when the next one begins.
    """
    if num_chunks < 1 or depth < 0:
        msg = (
            f"a pipeline needs at least one chunk and a depth of at least 0, got {num_chunks} "
            f"chunks and depth {depth}"
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
    """Return the seconds of the all-reduce over hosts in slices (`comm.hierarchical`).

    Args:
        nbytes: l, bytes of the tensor.
        cluster: Network. The last level is the network between hosts; an optional level below it is
            a host's memory.
        sync_s: Seconds of one synchronization of all ranks.
        chunk_bytes: Size of one chunk.
        depth: Number of chunks on the wire besides the one that is summed.
        copy_s_per_byte: Seconds per byte of a copy in memory.
        sum_s_per_byte: Seconds per byte of an addition.
    """
    network = cluster.levels[-1]
    local = cluster.num_ranks // network.size
    hosts = network.size
    chunk = min(nbytes, chunk_bytes)
    piece = chunk / local
    exchanges = 1 if hosts == 2 else 2
    sent = piece if hosts == 2 else piece * (hosts - 1) / hosts  # by one rank, in one exchange
    local_s = cluster.levels[0].latency_s if local > 1 else 0.0
    copied = chunk + chunk * (local - 1) / local if local > 1 else 0.0
    added = piece * (local - 1) + piece * (hosts - 1) / (1 if hosts == 2 else hosts)
    phases = [Phase("memory", copied * copy_s_per_byte + added * sum_s_per_byte, 2 * local_s)]
    # a rank waits for all its cross-node peers, not for one: that is a step, not a message
    phases += [Phase("card", _shared_s(network, sent, local), sync_s)] * exchanges
    return sync_s + pipelined_s(phases, max(1, -(-nbytes // max(1, chunk))), depth)


def _shared_s(level: Level, nbytes: float, at_once: int) -> float:
    """Return the seconds of work of a message that shares its link with others like it."""
    rate = float(level.max_rates(np.array([nbytes]))[0])
    return nbytes * max(1 / rate, at_once / level.bytes_per_s)
