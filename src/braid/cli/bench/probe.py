"""Measured latency and bandwidth between ranks, level by level, as a cluster.

The measured message is one from `Group.send` to `Group.recv`. `braid schedule simulate --cluster`
and `compare` read the file. Levels are NUMA nodes where there are several, the host, and the
network. Collectives inside a host do not send messages, so the selector uses costs of its own for
them (`Group.engine.explain`).
"""

from __future__ import annotations

from collections.abc import Sequence

from braid.cli.bench.workers.probe import MeasuredLevel, Probed
from braid.programs.topology import LEVEL_NAMES, Cluster, Level

__all__ = ["as_cluster", "level_of"]

NETWORK = LEVEL_NAMES[-1]
LEAST_S = 1e-7  # time of bytes that is hardly more than latency
LEAST_BURST = 0.05  # least share of a message in a bucket that is reported
LEAST_LATENCIES = 1.5  # least time of a message that shows bandwidth, in latencies
HALF_DUPLEX = 1.6  # time of both ways over that of one way, from which both share a link


def as_cluster(probed: Probed) -> Cluster:
    """Make a cluster of the measured levels."""
    return Cluster([level_of(level) for level in probed.levels])


def level_of(measured: MeasuredLevel) -> Level:
    """Return the level of a cluster that explains the measured times.

    No message is quicker than an empty one, so latency is the least of all times. A network's link
    has one rate: that of the bytes by which the two longest messages differ. After a rest a link
    passes some bytes faster, from a token bucket; the rate shows how many of them a message's time
    contains. The rate of memory is that of its best size.
    """
    times = sorted(measured.seconds.items())
    latency_s = min(measured.latency_s, *measured.seconds.values())
    significant = [(n, s) for n, s in times if s >= LEAST_LATENCIES * latency_s] or times[-1:]
    rates = [(float(n), _rate(n, s - latency_s)) for n, s in significant]
    bytes_per_s = max(rate for _, rate in rates)
    burst_bytes = 0.0
    if measured.name == NETWORK:
        bytes_per_s, burst_bytes = _bucket(times, latency_s)
        if burst_bytes:  # times below those of the link are due to the bucket
            quick = [n for n, _ in times if n <= burst_bytes]
            rates = [(float(n), _rate(n, measured.seconds[n] - latency_s)) for n in quick[-1:]]
        else:
            rates = [(n, min(rate, bytes_per_s)) for n, rate in rates]
    return Level(
        name=measured.name,
        size=measured.size,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        full_duplex=measured.both_ways_s < HALF_DUPLEX * times[-1][1],
        by_size=tuple(rates),
        burst_bytes=burst_bytes,
    )


def _bucket(times: Sequence[tuple[int, float]], latency_s: float) -> tuple[float, float]:
    """Compute rate and bucket of a link from times of messages by size, each after a rest."""
    nbytes, seconds = times[-1]
    whole = _rate(nbytes, seconds - latency_s)
    if len(times) == 1:
        return whole, 0.0
    shorter, sooner = times[-2]
    rate = _rate(nbytes - shorter, seconds - sooner)
    burst = shorter - rate * (sooner - latency_s)
    # a small difference of two large numbers is their noise
    return (rate, burst) if burst > LEAST_BURST * shorter else (whole, 0.0)


def _rate(nbytes: float, seconds: float) -> float:
    return nbytes / max(seconds, LEAST_S)
