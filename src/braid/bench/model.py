"""`braid bench net --model`: what the cost model says of algorithms, beside what they take.

Over a network the model is given what `braid probe` finds (latency, bandwidth by size, a barrier)
and what an addition and a copy cost; it predicts every algorithm that is carried out by name. In
shared memory it is `comm.selection`'s own, with the costs that it measures itself. Nothing is
fitted to the times that it is held against.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console as RichConsole
from rich.table import Table

from braid.bench.harness.lab import Lab
from braid.bench.harness.report import Report, Verdict, measured_on, new_table, save, show
from braid.bench.harness.several import Where, run_ranks
from braid.bench.harness.sizes import GBIT, KIB, MIB, size_text
from braid.bench.probe import as_cluster
from braid.bench.workers.model import Found, Near, Plan, Taken
from braid.comm.algorithms.hierarchical import CHUNKS, DEPTH, LEAST_BYTES, MOST_BYTES
from braid.comm.algorithms.programs import PIECE_BYTES
from braid.cost import hierarchical_s, program_s
from braid.schedule.collective import algorithm, program

__all__ = [
    "Held",
    "ModelReport",
    "ModelRun",
    "error",
    "model_table",
    "predict",
    "print_model",
    "run_model",
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
NEAR_SIZES_BYTES = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
HUNDRED_MS = 0.1
MOST_ERROR = {"network": 0.15, "memory": 0.25}


class Held(msgspec.Struct, kw_only=True):
    """A prediction beside a measurement."""

    taken: Taken
    predicted_s: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measurement; positive if it is too long."""
        return self.predicted_s / self.taken.seconds - 1


class ModelReport(Report, kw_only=True):
    """Figures of the cost model beside what was measured.

    Attributes:
        network: What the ranks were joined by, in words.
        far: Algorithms over the network.
        memory: Which ranks shared memory, in words.
        near: Algorithms in shared memory.
    """

    network: str
    far: list[Held]
    memory: str
    near: list[Held]


class ModelRun(NamedTuple):
    """What to measure.

    Attributes:
        num_hosts: Namespaces, of one rank each.
        gbit: Rate of their links, Gbit/s.
        ranks: That share memory.
        turns: Through everything.
        out: Directory for `model.json` and the run's logs.
    """

    num_hosts: int = 4
    gbit: float = 1.0
    ranks: int = 2
    turns: int = 9
    out: Path = Path("runs/bench-net")


def run_model(wanted: ModelRun, *, console: RichConsole | None = None) -> ModelReport:
    """Measure both, one after the other.

    Raises:
        ConfigError: No namespaces can be made here, or a rank failed.
    """
    wanted.out.mkdir(parents=True, exist_ok=True)
    measured = measured_on()
    shown = console or RichConsole(stderr=True)
    network = f"{wanted.num_hosts} hosts x 1 at {wanted.gbit:g} Gbit/s"
    memory = f"{wanted.ranks} ranks in shared memory"
    plan = Plan(
        algorithms=ALGORITHMS,
        sizes_bytes=SIZES_BYTES,
        message_bytes=MESSAGE_BYTES,
        turns=wanted.turns,
    )
    with (
        shown.status(f"{network}: messages and algorithms in turns"),
        Lab(wanted.num_hosts, wanted.gbit * GBIT) as lab,
    ):
        hosts = ",".join(f"{host}:1" for host in lab.hosts)
        where = Where(hosts=hosts, rsh=lab.rsh, inside=lab.inside)
        found = msgspec.json.decode(_measure(where, plan, wanted.out / "run-model"), type=Found)
    near_plan = msgspec.structs.replace(plan, algorithms=(), sizes_bytes=NEAR_SIZES_BYTES)
    with (
        shown.status(f"{memory}: costs and algorithms in turns"),
        Lab(1, 0.0) as lab,
    ):
        where = Where(hosts=f"{lab.hosts[0]}:{wanted.ranks}", rsh=lab.rsh, inside=lab.inside)
        near = msgspec.json.decode(_measure(where, near_plan, wanted.out / "run-near"), type=Near)
    report = ModelReport(
        **measured,
        network=network,
        far=predict(found),
        memory=memory,
        near=[
            Held(taken=taken, predicted_s=seconds)
            for taken, seconds in zip(near.taken, near.predicted_s, strict=True)
        ],
    )
    save(report, wanted.out / "model.json")
    return report


def _measure(where: Where, plan: Plan, log_dir: Path) -> str:
    told: list[str] = []
    encoded = msgspec.json.encode(plan)
    run_ranks(where, "braid.bench.workers.model", encoded, on_line=told.append, log_dir=log_dir)
    return told[-1]


def predict(found: Found) -> list[Held]:
    """What the cost model says of each algorithm, from what messages, copies and additions cost."""
    cluster = as_cluster(found.probed)
    held = []
    for taken in found.taken:
        if taken.algorithm == "hierarchical":
            seconds = hierarchical_s(
                taken.nbytes,
                cluster,
                sync_s=found.step_s,
                chunk_bytes=min(MOST_BYTES, max(LEAST_BYTES, taken.nbytes // CHUNKS)),
                depth=DEPTH,
                copy_s_per_byte=found.copy_s_per_byte,
                sum_s_per_byte=found.add_s_per_byte,
            )
        else:
            seconds = program_s(
                program(algorithm(taken.algorithm, taken.operation, found.ranks)),
                taken.nbytes,
                cluster,
                sync_s=found.step_s,
                piece_bytes=PIECE_BYTES,
                sum_s_per_byte=found.add_s_per_byte,
            )
        held.append(Held(taken=taken, predicted_s=seconds))
    return held


def error(held: Sequence[Held]) -> float:
    """Median of the relative errors, without their signs."""
    return statistics.median(abs(one.error) for one in held)


def model_table(report: ModelReport) -> Table:
    """Return a table with one row per place and algorithm: predicted, measured, error."""
    title = (
        f"predicted / measured ms and error, {report.machine}, load before {report.load:.1f} "
        f"a core, torch {report.torch}"
    )
    grid = new_table(title, ("", "algorithm"), [f"size {number + 1}" for number in range(5)])
    for place, held in ((report.network, report.far), (report.memory, report.near)):
        sizes = sorted({one.taken.nbytes for one in held})
        grid.add_row(place, "", *map(size_text, sizes))
        for pair in dict.fromkeys((one.taken.operation, one.taken.algorithm) for one in held):
            cells = {
                one.taken.nbytes: f"{_ms(one.predicted_s)} / {_ms(one.taken.seconds)} "
                f"{one.error:+.0%}"
                for one in held
                if (one.taken.operation, one.taken.algorithm) == pair
            }
            grid.add_row("", " ".join(pair), *(cells.get(size, "") for size in sizes))
    return grid


def verdicts(report: ModelReport) -> list[Verdict]:
    """Whether the errors are as small as was promised."""
    judged = []
    for kind, place, held in (
        ("network", report.network, report.far),
        ("memory", report.memory, report.near),
    ):
        found, most = error(held), MOST_ERROR[kind]
        claim = f"{place}: median error at most {most:.0%}"
        judged.append(Verdict(claim, f"found {found:.1%} of {len(held)}", found <= most))
    return judged


def print_model(report: ModelReport, out: Path) -> None:
    """Show the table and the verdicts, and say where the figures are."""
    show(model_table(report), verdicts(report), out / "model.json", width=160)


def _ms(seconds: float) -> str:
    """Three digits."""
    return f"{seconds * 1e3:.0f}" if seconds >= HUNDRED_MS else f"{seconds * 1e3:.3g}"
