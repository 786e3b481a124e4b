"""Options and figures of `ps`, shared by its command and its ranks."""

from __future__ import annotations

import statistics

import msgspec

from braid.cli.bench.harness.rounds import median_ratio

__all__ = ["PARTS", "Failover", "Measured", "Plan", "Ratio"]

PARTS = ("dense", "small", "pairs", "rows", "step", "failover", "stragglers")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make, and their sizes.

    Attributes:
        parts: Names out of `PARTS`.
        rounds: Number of rounds; every candidate is measured in each of them.
        dense_bytes: Bytes of the dense table.
        num_small: Number of small pushes in a round.
        num_pairs: Number of keys, each with one value.
        batch: Number of ids in a batch.
        vocabulary: Number of different ids.
        model: Model of the training step, see `ddp_models`.
        samples: Number of samples of each worker in a step.
        kills: Number of servers to kill.
        count_bytes: Bytes of the table with counted pushes.
        clock_s: Seconds of computation per clock on a worker that is not a straggler.
        clocks: Number of clocks in a measurement of stragglers.
        with_rpc: Whether to measure torch's RPC as well; it needs a process for each rank.
    """

    parts: tuple[str, ...] = PARTS
    rounds: int = 8
    dense_bytes: int = 16 << 20
    num_small: int = 100
    num_pairs: int = 10_000_000
    batch: int = 32_768
    vocabulary: int = 1_000_000
    model: str = "mlp"
    samples: int = 64
    kills: int = 5
    count_bytes: int = 4 << 20
    clock_s: float = 0.025
    clocks: int = 60
    with_rpc: bool = True


class Measured(msgspec.Struct, kw_only=True):
    """Seconds of one kind of measurement, by candidate.

    Attributes:
        name: Name of the measurement.
        amount: Bytes, pairs, rows or clocks of one measurement; 1 if only its time matters.
        seconds: Seconds of each candidate: the median of each round.
        note: Text about the candidates, such as the number of distinct rows.
    """

    name: str
    amount: float
    seconds: dict[str, list[float]]
    note: str = ""

    def median_s(self, way: str) -> float:
        """Return the seconds of a candidate, median of the rounds."""
        return statistics.median(self.seconds[way])

    def ratio(self, way: str, other: str) -> float:
        """Return the ratio of the seconds of two candidates, median of the rounds."""
        return median_ratio(self.seconds[way], self.seconds[other])


class Ratio(msgspec.Struct, kw_only=True):
    """Rates of several regimes of consistency.

    Attributes:
        rates: Clocks per second in each round, by regime.
    """

    rates: dict[str, list[float]]


class Failover(msgspec.Struct, kw_only=True):
    """Figures of servers that are killed.

    Attributes:
        slowest_s: Seconds of the slowest step between each kill and the next.
        repaired_s: Seconds from each kill until all shards had their copies again.
        step_s: Median seconds of all steps.
        steps: Number of steps of each worker.
        lost: Largest number of acknowledged pushes that an element lacks at the end.
        wrong: Number of pulls that did not show all acknowledged pushes.
    """

    slowest_s: list[float]
    repaired_s: list[float]
    step_s: float
    steps: int
    lost: int
    wrong: int
