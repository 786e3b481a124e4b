"""`braid probe`: this machine as a cluster of one level, with latency and bandwidth by size of the message.

What is measured is a message between ranks as `Group.send` and `Group.recv` carry it; the file is what `braid schedule simulate --cluster` and
`compare` read. Collectives inside a host do not send messages, so for them the selector's own costs count (`Group.engine.explain`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console as RichConsole

from braid.bench.probe_worker import Plan, Probed
from braid.errors import ConfigError
from braid.launch import JobSpec, QuietConsole, Supervisor
from braid.topology import Cluster, Level

__all__ = ["Probe", "as_cluster", "probe"]

SIZES = tuple(
    1 << power for power in range(16, 27, 2)
)  # 64 KiB, below which latency is most of it, to 64 MiB

LEAST_LATENCIES = (
    1.5  # that a message takes, for its bandwidth to be told from the noise of latency
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What to measure.

    Attributes:
        ranks: Of this host.
        sizes: Bytes of messages, multiples of 4.
        rounds: Of each size, at least.
        log_dir: Directory for the run's logs.
    """

    ranks: int = 2
    sizes: tuple[int, ...] = SIZES
    rounds: int = 15
    log_dir: Path = Path("runs/probe")

    def __post_init__(self) -> None:
        problems = []
        if self.ranks < 2:
            problems.append(f"the number of ranks is {self.ranks}, expected 2 or more")
        if self.rounds < 1:
            problems.append(f"rounds is {self.rounds}, expected 1 or more")
        if not self.sizes or any(n < 4 or n % 4 for n in self.sizes):
            problems.append(f"sizes are {self.sizes}, expected multiples of 4 bytes")
        if problems:
            raise ConfigError("; ".join(problems))


def probe(wanted: Probe, *, console: RichConsole | None = None) -> Cluster:
    """Measure in fresh processes.

    Args:
        wanted: What to measure.
        console: Where it is shown that something happens; standard error when None.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    wanted.log_dir.mkdir(parents=True, exist_ok=True)
    figures = wanted.log_dir / "figures.json"
    plan = Plan(sizes=wanted.sizes, rounds=wanted.rounds, out=str(figures.resolve()))
    job = JobSpec(
        command=("braid.bench.probe_worker", msgspec.json.encode(plan).decode()),
        kind="module",
        num_ranks=wanted.ranks,
        threads=1,
        log_dir=str(wanted.log_dir / "run"),
    )
    shown = console or RichConsole(stderr=True)
    with shown.status(f"sending messages between {wanted.ranks} ranks"):
        outcome = Supervisor(QuietConsole()).run(job)
    if not outcome.ok:
        raise ConfigError(str(outcome))
    found = msgspec.json.decode(figures.read_bytes(), type=Probed)
    figures.unlink()
    return as_cluster(wanted.ranks, found)


def as_cluster(ranks: int, found: Probed) -> Cluster:
    """Cluster of one host: what is not latency is bandwidth; messages that are hardly more than latency tell nothing of it.

    Args:
        ranks: Of the host.
        found: What was measured.
    """
    latency_s, times = found.latency_s, sorted(found.seconds.items())
    told = [(n, s) for n, s in times if s >= LEAST_LATENCIES * latency_s] or times[-1:]
    rates = [(float(n), n / max(s - latency_s, s / 100)) for n, s in told]
    host = Level(
        name="host",
        size=ranks,
        latency_s=latency_s,
        bytes_per_s=max(rate for _, rate in rates),
        by_size=tuple(rates),
    )
    return Cluster([host])
