"""Reports of benchmarks: figures are judged, shown and saved.

A bench fills a `Report`, whose first fields are the same everywhere. It draws one table of the
report and compares it with promises (`BenchVerdict`). `Benchmark.measure` writes JSON,
`Benchmark.show` prints the table and the verdicts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Generic, NamedTuple, TypeVar

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from braid._version import __version__
from braid.errors import below, raise_all

__all__ = [
    "BenchVerdict",
    "Benchmark",
    "Report",
    "check_minimums",
    "save",
    "unknown",
    "unsteady",
]

STEADY = 1.3  # ratio of times of equal work, below which a machine is idle


def load_per_core() -> float:
    """Return the load per core over the last minute; above some tenths it distorts figures."""
    return psutil.getloadavg()[0] / (psutil.cpu_count() or 1)


def machine() -> str:
    """Return the number of cores and the model of the processor."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{psutil.cpu_count()} cores {model}"


class Report(msgspec.Struct, kw_only=True):
    """The machine on which figures were measured; each bench adds its own figures.

    Attributes:
        braid: Version of braid.
        torch: Version of torch.
        machine: Cores and model of the processor.
        load: Load per core by other processes, just before; `Benchmark.measure` fills it in.
    """

    braid: str = __version__
    torch: str = msgspec.field(default_factory=lambda: importlib.metadata.version("torch"))
    machine: str = msgspec.field(default_factory=machine)
    load: float = 0.0

    @property
    def place(self) -> str:
        """Machine, version of torch and load, for titles of tables."""
        return f"{self.machine}, torch {self.torch}, load before {self.load:.1f} a core"


Options = TypeVar("Options")
ReportT = TypeVar("ReportT", bound=Report)


@dataclass(frozen=True)
class Benchmark(Generic[Options, ReportT]):
    """One benchmark.

    Attributes:
        name: Name of the file of its figures.
        options: Dataclass of its options, which tyro reads; `out` is the directory of the figures.
        take: Function of the options that returns the report; it shows its progress on a console.
        tables: Makes tables of a report.
        lines: Makes verdicts of a report, and other lines.
        draw: Draws pictures of a report into the directory, if matplotlib is installed.
        width: Number of columns of the tables where the output is no terminal.
    """

    name: str
    options: type[Options]
    take: Callable[[Options, Console], ReportT]
    tables: Callable[[ReportT], Table | Iterable[Table]]
    lines: Callable[[ReportT], Iterable[object]]
    draw: Callable[[ReportT, Path], None] = lambda _report, _out: None
    width: int = 120

    def measure(self, options: Options, console: Console | None = None) -> ReportT:
        """Measure in fresh processes, and write the figures to the directory of the options.

        Args:
            options: Options of the measurement.
            console: Console for a sign of progress; standard error when None.

        Raises:
            ConfigError: It cannot be measured here, or a rank failed; the message is the
                launcher's error block.
        """
        out: Path = options.out  # type: ignore[attr-defined]  # each dataclass has it
        out.mkdir(parents=True, exist_ok=True)
        load = load_per_core()
        report = self.take(options, console or Console(stderr=True))
        report.load = load
        save(report, out / f"{self.name}.json")
        return report

    def run(self, options: Options) -> int:
        """Measure and show, and return the exit code."""
        out: Path = options.out  # type: ignore[attr-defined]
        self.show(self.measure(options), out)
        return 0

    def show(self, report: ReportT, out: Path) -> None:
        """Print the tables, the lines below them, and the paths of pictures and figures.

        Args:
            report: The figures.
            out: Directory to which the report was written.
        """
        console = Console()
        if not console.is_terminal:
            console = Console(width=self.width)
        tables = self.tables(report)
        for table in [tables] if isinstance(tables, Table) else tables:
            console.print(table)
        began_s = time.time()
        if importlib.util.find_spec("matplotlib") is not None:
            self.draw(report, out)
        drawn = (path for path in sorted(out.glob("*.png")) if path.stat().st_mtime >= began_s - 1)
        for line in (*self.lines(report), *(f"plot  {path}" for path in drawn)):
            console.print(str(line), highlight=False, soft_wrap=True)
        console.print(f"figures  {out / self.name}.json")


class BenchVerdict(NamedTuple):
    """A promise, and whether it holds.

    Attributes:
        claim: Text of the promise.
        figure: Text of the measured figure.
        held: Whether it holds; None if too little was measured to decide.
    """

    claim: str
    figure: str
    held: bool | None

    def __str__(self) -> str:
        label = {True: "held  ", False: "missed", None: "open  "}[self.held]
        return f"{label}  {self.claim}, {self.figure}"


def check_minimums(
    values: Iterable[tuple[str, float, float]], problems: Sequence[str] = ()
) -> None:
    """Refuse options that are too small.

    Args:
        values: Name, value and least value of each option.
        problems: Texts of other problems.

    Raises:
        ConfigError: Some value is too small, or there are other problems; names all of them.
    """
    small = [problem for name, value, least in values for problem in below(least, **{name: value})]
    raise_all([*small, *problems])


def unknown(kind: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return a problem for each name that is not known, for `check_minimums`."""
    choices = ", ".join(known := tuple(known))
    return [
        f"there is no {kind} {name}: choose out of {choices}" for name in names if name not in known
    ]


def unsteady(label: str, work: str, seconds: Sequence[float], least_rounds: int) -> list[str]:
    """Return a warning if other programs slowed the machine down during a measurement.

    Args:
        label: Name of the measured case.
        work: Name of the work, which takes equal times on an idle machine.
        seconds: Times of the work by round.
        least_rounds: Number of rounds below which nothing is known.
    """
    if len(seconds) < least_rounds:
        return []
    low_s, *_, high_s = quantiles(seconds, n=10)
    if high_s <= STEADY * low_s:
        return []
    text = (
        f"unsteady  {label}: {work} took {low_s * 1e3:.0f} to {high_s * 1e3:.0f} ms (tenth and "
        "ninetieth percentile): something else has slowed the machine down; measure again"
    )
    return [text]


def save(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
