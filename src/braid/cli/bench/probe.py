"""Converts measured latency and bandwidth between ranks to a cluster description, by level.

A measured message goes from `Group.send` to `Group.recv`. `braid schedule simulate --cluster` and
`compare` read the file. Levels are NUMA nodes if there are several, the host, and the network.
Collectives inside a host do not send messages, so the selector uses other costs for them
(`Group.engine.explain`).
"""

from __future__ import annotations

from collections.abc import Sequence

from braid.cli.bench.workers.probe import MeasuredLevel, Probed
from braid.programs.topology import LEVEL_NAMES, Cluster, Level

__all__ = ["as_cluster", "level_of"]

NETWORK = LEVEL_NAMES[-1]
LEAST_S = 1e-7  # a smaller time difference is noise of the latency
LEAST_BURST = 0.05  # smallest reported bucket, as a share of a message
LEAST_LATENCIES = 1.5  # a message shows bandwidth from this number of latencies on
HALF_DUPLEX = 1.6  # from this ratio of two-way to one-way time on, both ways share a link


def as_cluster(probed: Probed) -> Cluster:
    """Return a cluster with the measured levels."""
    return Cluster([level_of(level) for level in probed.levels])


def level_of(measured: MeasuredLevel) -> Level:
    """Fit the latency and bandwidth of a level to the measured times.

    The latency is the smallest of all times. The rate of a network link is computed from the
    difference of the two longest messages. After a rest, a link with a token bucket passes some
    bytes faster; the rate shows how many. The rate of memory is the rate of the fastest size.
    """
    times = sorted(measured.seconds.items())
    latency_s = min(measured.latency_s, *measured.seconds.values())
    significant = [(n, s) for n, s in times if s >= LEAST_LATENCIES * latency_s] or times[-1:]
    rates = [(float(n), _rate(n, s - latency_s)) for n, s in significant]
    bytes_per_s = max(rate for _, rate in rates)
    burst_bytes = 0.0
    if measured.name == NETWORK:
        bytes_per_s, burst_bytes = _bucket(times, latency_s)
        if burst_bytes:  # times shorter than the link's are due to the bucket
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
    """Return rate and bucket of a link from times of messages by size, each after a rest."""
    nbytes, seconds = times[-1]
    whole = _rate(nbytes, seconds - latency_s)
    if len(times) == 1:
        return whole, 0.0
    shorter, sooner = times[-2]
    rate = _rate(nbytes - shorter, seconds - sooner)
    burst = shorter - rate * (sooner - latency_s)
    # a small difference of two large numbers is noise
    return (rate, burst) if burst > LEAST_BURST * shorter else (whole, 0.0)


def _rate(nbytes: float, seconds: float) -> float:
    return nbytes / max(seconds, LEAST_S)
