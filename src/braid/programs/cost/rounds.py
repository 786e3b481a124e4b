"""Time of an algorithm on a hundred thousand ranks: round by round, vectorized over ranks.

Written out, a ring on 100,000 ranks has 2 * 10^10 messages. But all ranks of a round do the same at
the same time, so arrays suffice: for each kind of round, count the messages on every link, compute
latency + bytes * (messages on its narrowest link) for each message, and set

    t[source], t[target]  =  max(t[source], t[target]) + seconds of the message

A repeated round is computed until every rank is delayed by the same time per repetition, and then
multiplied. The shared bandwidth is computed as if the ranks of a round start together. If they do,
the result equals the simulator's (tests, up to 256 ranks). Messages of different rounds do not
share links here, though they may overlap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from braid.errors import below, raise_all
from braid.programs.schedule.collective import Round, Rounds
from braid.programs.topology import Cluster

__all__ = ["Estimate", "messages_s", "simulate_rounds"]

Seconds = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int64]
EXACT_REPEATS = 512  # repetitions of one round; each further one costs the slowest rank's time


class Estimate(NamedTuple):
    """Cost of an algorithm on a cluster.

    Attributes:
        seconds: Seconds until the last rank has finished.
        level_bytes: Bytes on all links of each level of the cluster, by name. A message counts
            twice: on its way up and on its way down.
    """

    seconds: float
    level_bytes: dict[str, float]


def simulate_rounds(
    rounds: Rounds, nbytes: float, cluster: Cluster, sum_s_per_byte: float = 0.0
) -> Estimate:
    """Return seconds and bytes of `rounds` on `cluster`.

    Args:
        rounds: Algorithm; its number of ranks is at most the cluster's.
        nbytes: l, bytes of the largest full buffer of a rank.
        cluster: Network.
        sum_s_per_byte: c, seconds to add up one byte.

    Raises:
        ConfigError: The cluster has fewer ranks, or `nbytes` is negative.
    """
    cluster.check_size(rounds.num_ranks)
    raise_all(below(0, nbytes=nbytes))
    block_bytes = rounds.block_bytes(nbytes)
    ready = np.zeros(rounds.num_ranks)
    totals = np.zeros(len(cluster.levels))
    for step in rounds.steps:
        if not isinstance(step, Round):
            continue
        size = np.broadcast_to(step.num_blocks * block_bytes, len(step.sources))
        seconds, links = _at_once(cluster, step.sources, step.targets, size)
        _repeat(ready, step, seconds, size * sum_s_per_byte * step.adds)
        per_level = (links >= 0).reshape(len(links), -1, 2).sum(axis=2)
        totals += (per_level * size[:, None]).sum(axis=0) * step.repeat
    names = [level.name for level in cluster.levels]
    return Estimate(float(ready.max()), dict(zip(names, totals.tolist(), strict=True)))


def messages_s(cluster: Cluster, sources: Ranks, targets: Ranks, nbytes: float) -> Seconds:
    """Return the seconds of each message, for messages of one size sent at the same time.

    Args:
        cluster: Network; messages share its links.
        sources: Sending rank of each message.
        targets: Receiving rank of each message.
        nbytes: Bytes of each message.
    """
    return _at_once(cluster, sources, targets, np.full(len(sources), nbytes))[0]


def _at_once(
    cluster: Cluster, sources: Ranks, targets: Ranks, size: Seconds
) -> tuple[Seconds, Ranks]:
    """Return the seconds and the links of messages that are sent at the same time."""
    latency, links = cluster.routes(sources, targets)
    used = links >= 0
    load = np.bincount(links[used], minlength=len(cluster.bytes_per_s))
    shared = np.where(used, load[links] / cluster.bytes_per_s[links], 0.0).max(axis=1)
    return latency + size * np.maximum(shared, 1 / cluster.max_rates(links, size)), links


def _repeat(ready: Seconds, step: Round, seconds: Seconds, added_s: Seconds) -> None:
    """Advance `ready` to the times after all repetitions."""
    before = ready.copy()
    for number in range(step.repeat):
        if number == EXACT_REPEATS:
            ready += (step.repeat - number) * float((seconds + added_s).max())
            return
        ends = np.maximum(ready[step.sources], ready[step.targets]) + seconds
        before[:] = ready
        np.maximum.at(ready, step.sources, ends)
        np.maximum.at(ready, step.targets, ends)
        ready[step.targets] += added_s
        delayed = ready - before
        if number and np.ptp(delayed) <= 1e-12 * delayed.max():
            ready += (step.repeat - number - 1) * delayed.max()
            return
