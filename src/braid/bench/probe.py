"""`braid probe`: latency and bandwidth between ranks, level by level, as a cluster.

What is measured is a message between ranks as `Group.send` and `Group.recv` carry it; the file is
what `braid schedule simulate --cluster` and `compare` read. Levels are NUMA nodes where there are
several, the host, and the network. Collectives inside a host do not send messages, so for them the
selector's own costs count (`Group.engine.explain`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console as RichConsole

from braid.bench.harness.one_host import run_here
from braid.bench.harness.several import Where, run_ranks
from braid.bench.workers.probe import Measured, Plan, Probed
from braid.errors import ConfigError
from braid.topology import LEVEL_NAMES, Cluster, Level

__all__ = ["Probe", "as_cluster", "level_of", "probe", "run_probe"]

SIZES = tuple(
    1 << power for power in range(16, 27, 2)
)  # 64 KiB, below which latency is most of it, to 64 MiB
FAR_SIZES = tuple(1 << power for power in range(10, 25, 2))  # 1 KiB to 16 MiB

NETWORK = LEVEL_NAMES[-1]
LEAST_S = 1e-7  # what bytes take that are hardly more than latency
LEAST_BURST = 0.05  # of a message from which a bucket is told
LEAST_LATENCIES = (
    1.5  # that a message takes, for its bandwidth to be told from the noise of latency
)
HALF_DUPLEX = (
    1.6  # times as long as one way alone that both ways together take, from which they share a link
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What to measure.

    Attributes:
        ranks: Of this host, when no others are named.
        sizes: Bytes of messages, multiples of 4; when None, 64 KiB to 64 MiB in a host, 1 KiB to 16
            MiB over several.
        rounds: Turns through all of them.
        where: Hosts that are reached; None for this one.
        pin: Whether ranks stay on the processors of one NUMA node.
        log_dir: Directory for the run's logs.
    """

    ranks: int = 2
    sizes: tuple[int, ...] | None = None
    rounds: int = 15
    where: Where | None = None
    pin: bool = True
    log_dir: Path = Path("runs/probe")

    def __post_init__(self) -> None:
        problems = []
        if self.ranks < 2 and self.where is None:
            problems.append(f"the number of ranks is {self.ranks}, expected 2 or more")
        if self.rounds < 1:
            problems.append(f"rounds is {self.rounds}, expected 1 or more")
        if self.sizes is not None and (not self.sizes or any(n < 4 or n % 4 for n in self.sizes)):
            problems.append(f"sizes are {self.sizes}, expected multiples of 4 bytes")
        if problems:
            raise ConfigError("; ".join(problems))


def probe(wanted: Probe, *, console: RichConsole | None = None) -> Cluster:
    """Measure in fresh processes.

    Args:
        wanted: What to measure.
        console: Where it is shown that something happens; standard error when None.

    Raises:
        ConfigError: A rank failed, or a host cannot be reached; the message is the launcher's error
            block.
    """
    return as_cluster(run_probe(wanted, console=console))


def run_probe(wanted: Probe, *, console: RichConsole | None = None) -> Probed:
    """The figures themselves; see `probe`."""
    wanted.log_dir.mkdir(parents=True, exist_ok=True)
    sizes = wanted.sizes or (SIZES if wanted.where is None else FAR_SIZES)
    plan = msgspec.json.encode(Plan(sizes=sizes, rounds=wanted.rounds, pin=wanted.pin))
    shown = console or RichConsole(stderr=True)
    log_dir = wanted.log_dir / "run"
    worker = "braid.bench.workers.probe"
    told: list[str] = []
    if wanted.where is not None:
        with shown.status(f"sending messages between ranks on {wanted.where.hosts}"):
            run_ranks(wanted.where, worker, plan, on_line=told.append, log_dir=log_dir)
    else:
        with shown.status(f"sending messages between {wanted.ranks} ranks"):
            run_here(wanted.ranks, worker, plan, on_line=told.append, log_dir=log_dir)
    return msgspec.json.decode(told[-1] if told else "", type=Probed)


def as_cluster(found: Probed) -> Cluster:
    """The cluster of what was measured."""
    return Cluster([level_of(level) for level in found.levels])


def level_of(found: Measured) -> Level:
    """Return the level of a cluster that explains the measured times.

    No message is quicker than an empty one, so latency is the least that any took. A network's link
    has one rate, that of what the longest message has beside the next: after a rest a link lets
    some bytes through faster, from a bucket of tokens, and what of them is in the time of a message
    is told by the rate. Memory is as fast as at its best size.
    """
    times = sorted(found.seconds.items())
    latency_s = min(found.latency_s, *found.seconds.values())
    told = [(n, s) for n, s in times if s >= LEAST_LATENCIES * latency_s] or times[-1:]
    rates = [(float(n), _rate(n, s - latency_s)) for n, s in told]
    bytes_per_s = max(rate for _, rate in rates)
    burst_bytes = 0.0
    if found.name == NETWORK:
        bytes_per_s, burst_bytes = _bucket(times, latency_s)
        if burst_bytes:  # what is quicker than the link is so from the bucket
            quick = [n for n, _ in times if n <= burst_bytes]
            rates = [(float(n), _rate(n, found.seconds[n] - latency_s)) for n in quick[-1:]]
        else:
            rates = [(n, min(rate, bytes_per_s)) for n, rate in rates]
    return Level(
        name=found.name,
        size=found.size,
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        full_duplex=found.both_ways_s < HALF_DUPLEX * times[-1][1],
        by_size=tuple(rates),
        burst_bytes=burst_bytes,
    )


def _bucket(times: Sequence[tuple[int, float]], latency_s: float) -> tuple[float, float]:
    """Rate and bucket of a link, from seconds of messages by ascending size, each after a rest."""
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
