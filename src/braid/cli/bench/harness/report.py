"""Reports of benchmarks: figures are judged, shown and saved.

A bench fills a `Report`, whose first fields are the same everywhere. It draws one table of the
report and compares it with promises (`BenchVerdict`). `save` writes JSON, `show` prints the table
and the verdicts.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

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
    "measured_on",
    "save",
    "show",
    "unknown_parts",
]

WIDTH = 120  # columns of a table outside of a terminal


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
        load: Load per core by other processes, just before.
    """

    braid: str
    torch: str
    machine: str
    load: float = 0.0


def measured_on() -> dict[str, Any]:
    """Collect the fields of a `Report`; call it before anything is started."""
    return {
        "braid": __version__,
        "torch": importlib.metadata.version("torch"),
        "machine": machine(),
        "load": load_per_core(),
    }


Options = TypeVar("Options")
ReportT = TypeVar("ReportT", bound=Report)


@dataclass(frozen=True)
class Benchmark(Generic[Options, ReportT]):
    """One benchmark.

    Attributes:
        name: Name of the file of its figures.
        options: Dataclass of its options, which tyro reads; `out` is the directory of the figures.
        take: Function of the options that returns the report; it shows its progress on a console.
        show: Prints a report; its second argument is the directory.
    """

    name: str
    options: type[Options]
    take: Callable[[Options, Console], ReportT]
    show: Callable[[ReportT, Path], None]

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
        report = self.take(options, console or Console(stderr=True))
        save(report, out / f"{self.name}.json")
        return report

    def run(self, options: Options) -> int:
        """Measure and show, and return the exit code."""
        out: Path = options.out  # type: ignore[attr-defined]
        self.show(self.measure(options), out)
        return 0


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


def unknown_parts(only: Sequence[str], parts: Sequence[str]) -> list[str]:
    """Return the problems with a choice of parts, for `check_minimums`."""
    known = ", ".join(parts)
    return [f"there is no part {each}: choose out of {known}" for each in only if each not in parts]


def save(report: Report, path: Path) -> None:
    """Write a report as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)))


def show(
    tables: Table | Sequence[Table], lines: Iterable[object], path: Path, *, width: int = WIDTH
) -> None:
    """Print tables, lines below them, and the path of the figures.

    Args:
        tables: The figures.
        lines: Verdicts, or other lines.
        path: File to which the report was written.
        width: Number of columns where the output is no terminal.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=width)
    for table in [tables] if isinstance(tables, Table) else tables:
        console.print(table)
    for line in lines:
        console.print(str(line), highlight=False, soft_wrap=True)
    console.print(f"figures  {path}")
