"""Plan and figures of `ps`, which its front and its ranks share."""

from __future__ import annotations

import statistics

import msgspec

__all__ = ["PARTS", "Failover", "Measured", "Plan", "Ratio"]

PARTS = ("dense", "small", "pairs", "rows", "step", "failover", "stragglers")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make, and their sizes.

    Attributes:
        parts: Names out of `PARTS`.
        rounds: Number of rounds, in each of which every candidate is measured.
        dense_bytes: Bytes of the dense table.
        num_small: Small pushes in a round.
        num_pairs: Keys, each with one value.
        batch: Ids of a batch.
        vocabulary: Number of different ids.
        model: Model of the training step, see `ddp_models`.
        samples: Samples of each worker in a step.
        kills: Servers that are killed, one after the other.
        count_bytes: Bytes of the table whose pushes are counted.
        clock_s: Seconds of computation of a worker that is no straggler, in each clock.
        clocks: Clocks of a measurement of stragglers.
        with_rpc: Whether torch's RPC is measured beside; it needs a process for each rank.
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
    """Seconds of one act, by candidate.

    Attributes:
        name: Name of the act.
        amount: Bytes, pairs, rows or clocks of one act; 1 where only its time matters.
        seconds: Seconds of each candidate: the median of every round.
        note: Text about the candidates, such as distinct rows.
    """

    name: str
    amount: float
    seconds: dict[str, list[float]]
    note: str = ""

    def ratio(self, way: str, other: str) -> float:
        """Return the seconds of a candidate over those of another: the median over rounds."""
        pairs = zip(self.seconds[way], self.seconds[other], strict=True)
        return statistics.median(own_s / other_s for own_s, other_s in pairs)


class Ratio(msgspec.Struct, kw_only=True):
    """Rates of several regimes of consistency, relative to one.

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
        lost: Acknowledged pushes that the values lack at the end, over all elements.
        wrong: Pulls that did not show all acknowledged pushes.
    """

    slowest_s: list[float]
    repaired_s: list[float]
    step_s: float
    steps: int
    lost: int
    wrong: int
