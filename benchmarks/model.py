"""`model`: compare the times that the cost model predicts with measured ones.

Over a network the model gets the results of `braid probe` (latency, bandwidth by size, a barrier)
and the cost of an addition and a copy. It predicts every named algorithm. In shared memory the
model of `comm.engines.selection` is used, with the costs that it measures. The model is not fitted
to the times with which it is compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.lab import Lab
from benchmarks.workers.model import AlgorithmTime, MemoryFigures, NetworkFigures, Plan, main
from braid.cli.bench.harness.options import GBIT, KIB, MIB, Ranks
from braid.cli.bench.harness.ranks import figures_there
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report
from braid.cli.bench.probe import as_cluster
from braid.comm.algorithms.hierarchical import CHUNKS, DEPTH, LEAST_BYTES, MOST_BYTES
from braid.comm.algorithms.programs import PIECE_BYTES
from braid.programs.cost import hierarchical_s, program_s
from braid.programs.schedule.collective import algorithm, program
from braid.runtime.terminal_table import new_table
from braid.runtime.text import bytes_text

__all__ = [
    "BENCH",
    "Held",
    "ModelBench",
    "ModelReport",
    "error",
    "model_table",
    "predict",
    "verdicts",
]

ALGORITHMS = (
    ("all_reduce", "ring"),
    ("all_reduce", "tree"),
    ("all_reduce", "halving_doubling"),
    ("all_reduce", "doubling"),
    ("all_reduce", "naive"),
    ("all_reduce", "hierarchical"),
    ("all_gather", "ring"),
    ("all_gather", "bruck"),
    ("broadcast", "tree"),
)
SIZES_BYTES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
MESSAGE_BYTES = tuple(1 << power for power in range(10, 23, 2))
MEMORY_SIZES_BYTES = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
HUNDRED_MS = 0.1
MOST_ERROR = {"network": 0.15, "memory": 0.25}


class Held(msgspec.Struct, kw_only=True):
    """A predicted and a measured time.

    Attributes:
        time: The measured time.
        predicted_s: The predicted time in seconds.
    """

    time: AlgorithmTime
    predicted_s: float

    @property
    def error(self) -> float:
        """Error of the prediction relative to the measurement; positive if it is too long."""
        return self.predicted_s / self.time.seconds - 1


class ModelReport(Report, kw_only=True):
    """Predictions of the cost model and measurements.

    Attributes:
        network: Description of the network between the ranks.
        over_network: Algorithms over the network.
        memory: Description of the ranks that share memory.
        in_memory: Algorithms in shared memory.
    """

    network: str
    over_network: list[Held]
    memory: str
    in_memory: list[Held]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelBench:
    """Compare the cost model with measured algorithms, on namespaces and in shared memory.

    Attributes:
        num_hosts: Number of namespaces, with one rank each.
        gbit: Rate of their links, Gbit/s.
        ranks: Number of ranks that share memory.
        turns: Number of turns through all measurements.
        out: Directory for `model.json` and the run's logs.
    """

    num_hosts: int = 4
    gbit: float = 1.0
    ranks: Ranks = 2
    turns: int = 9
    out: Path = Path("runs/bench-model")


def _measure_model(wanted: ModelBench, console: RichConsole) -> ModelReport:
    network = f"{wanted.num_hosts} hosts x 1 at {wanted.gbit:g} Gbit/s"
    memory = f"{wanted.ranks} ranks in shared memory"
    plan = Plan(
        algorithms=ALGORITHMS,
        sizes_bytes=SIZES_BYTES,
        message_bytes=MESSAGE_BYTES,
        turns=wanted.turns,
    )
    with (
        console.status(f"{network}: messages and algorithms in turns"),
        Lab(wanted.num_hosts, wanted.gbit * GBIT) as lab,
    ):
        log_dir = wanted.out / "run-model"
        (figures,) = figures_there(lab.where(), main, plan, NetworkFigures, log_dir=log_dir)
    shared_plan = msgspec.structs.replace(plan, algorithms=(), sizes_bytes=MEMORY_SIZES_BYTES)
    with (
        console.status(f"{memory}: costs and algorithms in turns"),
        Lab(1, 0.0) as lab,
    ):
        where, log_dir = lab.where(wanted.ranks), wanted.out / "run-memory"
        (shared,) = figures_there(where, main, shared_plan, MemoryFigures, log_dir=log_dir)
    return ModelReport(
        network=network,
        over_network=predict(figures),
        memory=memory,
        in_memory=[
            Held(time=time, predicted_s=seconds)
            for time, seconds in zip(shared.times, shared.predicted_s, strict=True)
        ],
    )


def predict(figures: NetworkFigures) -> list[Held]:
    """Predict the time of each algorithm from the costs of messages, copies and additions."""
    cluster = as_cluster(figures.probed)
    held = []
    for time in figures.times:
        if time.algorithm == "hierarchical":
            seconds = hierarchical_s(
                time.nbytes,
                cluster,
                sync_s=figures.step_s,
                chunk_bytes=min(MOST_BYTES, max(LEAST_BYTES, time.nbytes // CHUNKS)),
                depth=DEPTH,
                copy_s_per_byte=figures.copy_s_per_byte,
                sum_s_per_byte=figures.add_s_per_byte,
            )
        else:
            seconds = program_s(
                program(algorithm(time.algorithm, time.operation, figures.ranks)),
                time.nbytes,
                cluster,
                sync_s=figures.step_s,
                piece_bytes=PIECE_BYTES,
                sum_s_per_byte=figures.add_s_per_byte,
            )
        held.append(Held(time=time, predicted_s=seconds))
    return held


def error(held: Sequence[Held]) -> float:
    """Return the median of the relative errors, without their signs."""
    return statistics.median(abs(one.error) for one in held)


def model_table(report: ModelReport) -> Table:
    """Return a table with one row per place and algorithm: predicted, measured, error."""
    title = f"predicted / measured ms and error, {report.place}"
    grid = new_table(title, ("", "algorithm"), [f"size {number + 1}" for number in range(5)])
    for place, held in ((report.network, report.over_network), (report.memory, report.in_memory)):
        sizes = sorted({one.time.nbytes for one in held})
        grid.add_row(place, "", *map(bytes_text, sizes))
        for pair in dict.fromkeys((one.time.operation, one.time.algorithm) for one in held):
            cells = {
                one.time.nbytes: f"{_ms(one.predicted_s)} / {_ms(one.time.seconds)} "
                f"{one.error:+.0%}"
                for one in held
                if (one.time.operation, one.time.algorithm) == pair
            }
            grid.add_row("", " ".join(pair), *(cells.get(size, "") for size in sizes))
    return grid


def verdicts(report: ModelReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for errors."""
    judged = []
    for kind, place, held in (
        ("network", report.network, report.over_network),
        ("memory", report.memory, report.in_memory),
    ):
        median, most = error(held), MOST_ERROR[kind]
        claim = f"{place}: median error at most {most:.0%}"
        judged.append(BenchVerdict(claim, f"measured {median:.1%} of {len(held)}", median <= most))
    return judged


def _ms(seconds: float) -> str:
    """Format milliseconds with three digits."""
    return f"{seconds * 1e3:.0f}" if seconds >= HUNDRED_MS else f"{seconds * 1e3:.3g}"


BENCH = Benchmark("model", ModelBench, _measure_model, model_table, verdicts, width=160)
