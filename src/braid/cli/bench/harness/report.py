"""Reports of benchmarks: results are compared with claims, shown and saved.

A benchmark fills a subclass of `Report`, makes tables of it, and compares it with claims
(`BenchVerdict`). `Benchmark.measure` writes JSON,
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

STEADY = 1.3  # ratio of times of equal work below this value: the machine is idle


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
    """Base class of reports, with the machine; each benchmark adds its results.

    Attributes:
        braid: Version of braid.
        torch: Version of torch.
        machine: Cores and model of the processor.
        load: Load per core before the measurement; set by `Benchmark.measure`.
    """

    braid: str = __version__
    torch: str = msgspec.field(default_factory=lambda: importlib.metadata.version("torch"))
    machine: str = msgspec.field(default_factory=machine)
    load: float = 0.0

    @property
    def system(self) -> str:
        """Machine and torch version, for titles of tables."""
        return f"{self.machine}, torch {self.torch}"

    @property
    def place(self) -> str:
        """Machine, torch version and load, for titles of tables."""
        return f"{self.system}, load before {self.load:.1f} a core"


Options = TypeVar("Options")
ReportT = TypeVar("ReportT", bound=Report)


@dataclass(frozen=True)
class Benchmark(Generic[Options, ReportT]):
    """A benchmark: its options, measurement and output.

    Attributes:
        name: Name of the results file, without its suffix.
        options: Dataclass of the options, which tyro parses; `out` is the directory of the results.
        take: Function of options and console that measures and returns the report.
        tables: Function that returns tables of a report.
        lines: Function that returns verdicts on a report, and other lines.
        draw: Function that draws a report into the directory, if matplotlib is installed.
        width: Number of columns of the tables if the output is not a terminal.
    """

    name: str
    options: type[Options]
    take: Callable[[Options, Console], ReportT]
    tables: Callable[[ReportT], Table | Iterable[Table]]
    lines: Callable[[ReportT], Iterable[object]]
    draw: Callable[[ReportT, Path], None] = lambda _report, _out: None
    width: int = 120

    def measure(self, options: Options, console: Console | None = None) -> ReportT:
        """Measure in new processes, and write the report to the directory in the options.

        Args:
            options: Options of the measurement.
            console: Console for the progress bar; standard error if None.

        Raises:
            ConfigError: The options cannot be measured on this machine, or a rank failed; the
                message is the launcher's error block.
        """
        out: Path = options.out  # type: ignore[attr-defined]  # each dataclass has `out`
        out.mkdir(parents=True, exist_ok=True)
        load = psutil.getloadavg()[0] / (psutil.cpu_count() or 1)  # above 0.3 it distorts results
        report = self.take(options, console or Console(stderr=True))
        report.load = load
        save(report, out / f"{self.name}.json")
        return report

    def run(self, options: Options) -> int:
        """Measure, print the report, and return the exit code."""
        out: Path = options.out  # type: ignore[attr-defined]
        self.show(self.measure(options), out)
        return 0

    def show(self, report: ReportT, out: Path) -> None:
        """Print the tables, the lines below them, and the paths of pictures and results.

        Args:
            report: Report to print.
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
    """A claim about performance, and whether it holds.

    Attributes:
        claim: Text of the claim.
        figure: Text of the measured value.
        held: Whether the claim holds; None if the measurement cannot decide.
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
    """Raise ConfigError if options are too small.

    Args:
        values: Name, value and least value of each option.
        problems: Texts of other problems.

    Raises:
        ConfigError: A value is too small, or `problems` is not empty; names all problems.
    """
    small = [problem for name, value, least in values for problem in below(least, **{name: value})]
    raise_all([*small, *problems])


def unknown(kind: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return a problem for each of `names` that is not in `known`; `kind` says what they name."""
    choices = ", ".join(known := tuple(known))
    return [
        f"there is no {kind} {name}: choose one of {choices}" for name in names if name not in known
    ]


def unsteady(label: str, work: str, seconds: Sequence[float], least_rounds: int) -> list[str]:
    """Return a warning if other programs slowed the machine down during a measurement.

    Args:
        label: Name of the measured case.
        work: Name of the work, which takes equal times on an idle machine.
        seconds: Times of the work by round.
        least_rounds: Smallest number of rounds that gives a warning.
    """
    if len(seconds) < least_rounds:
        return []
    low_s, *_, high_s = quantiles(seconds, n=10)
    if high_s <= STEADY * low_s:
        return []
    text = (
        f"unsteady  {label}: {work} took {low_s * 1e3:.0f} to {high_s * 1e3:.0f} ms (tenth and "
        "ninetieth percentile): other programs slowed the machine down; measure again"
    )
    return [text]


def save(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
