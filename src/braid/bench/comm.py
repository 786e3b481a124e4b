"""`braid bench comm`: collectives against Gloo, as a table, as JSON and as a plot.

What is compared: braid's `Group` called directly, on ordinary tensors and on registered ones (`Group.empty`), against Gloo
through `torch.distributed`, in the same processes in one run (`comm_worker`). Bytes are those of the largest full
buffer of a rank.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
from rich import box
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from braid._version import __version__
from braid.bench.comm_worker import Plan, Row
from braid.errors import ConfigError
from braid.launch import JobSpec, QuietConsole, Supervisor

__all__ = ["OPERATIONS", "CommBench", "CommReport", "plot", "print_report", "run_comm", "table"]

OPERATIONS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
    "barrier",
)
SIZES_BYTES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
DTYPES = ("float32",)
KNOWN_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int8",
    "uint8",
)  # Gloo's


class CommReport(msgspec.Struct, kw_only=True):
    """Rows and where they were measured."""

    braid: str
    torch: str
    machine: str
    ranks: int
    rows: list[Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommBench:
    """What to measure.

    Attributes:
        ranks: World size.
        operations: Out of `OPERATIONS`.
        sizes_bytes: Bytes of the largest full buffer of a rank.
        dtypes: torch's names.
        rounds: Alternating rounds for each row.
        budget_s: Seconds of one library in one round, about.
        out: Directory for `comm.json`, `comm.png` and the run's logs.
    """

    ranks: int = 2
    operations: tuple[str, ...] = OPERATIONS
    sizes_bytes: tuple[int, ...] = SIZES_BYTES
    dtypes: tuple[str, ...] = DTYPES
    rounds: int = 5
    budget_s: float = 0.1
    out: Path = Path("runs/bench-comm")

    def __post_init__(self) -> None:
        unknown = [name for name in self.operations if name not in OPERATIONS]
        if unknown:
            msg = f"expected operations out of {', '.join(OPERATIONS)}, found {', '.join(unknown)}"
            raise ConfigError(msg)
        unknown = [name for name in self.dtypes if name not in KNOWN_DTYPES]
        if unknown:
            msg = f"expected dtypes out of {', '.join(KNOWN_DTYPES)}, found {', '.join(unknown)}"
            raise ConfigError(msg)
        least = [("the number of ranks", self.ranks, 2), ("the number of rounds", self.rounds, 1)]
        least += [("a size in bytes", size, 1) for size in self.sizes_bytes]
        problems = [f"{name} is {n}, expected {low} or more" for name, n, low in least if n < low]
        if problems:
            raise ConfigError("; ".join(problems))


class _Bar(QuietConsole):
    """Moves a progress bar by one for every row that rank 0 prints."""

    def __init__(self, progress: Progress, total: int) -> None:
        super().__init__()
        self._progress = progress
        self._task = progress.add_task("measuring", total=total)

    def line(self, rank: int, stream: int, text: bytes, end: bytes = b"\n") -> None:
        super().line(rank, stream, text, end)
        if rank == 0 and text.startswith(b"{"):
            row = msgspec.json.decode(text, type=Row)
            self._progress.update(self._task, advance=1, description=f"{row.operation} done")


def run_comm(bench: CommBench, *, console: RichConsole | None = None) -> CommReport:
    """Measure in fresh processes.

    Args:
        bench: What to measure.
        console: Where a progress bar is shown; standard error when None.

    Raises:
        ConfigError: A rank failed; the message is the launcher's error block.
    """
    bench.out.mkdir(parents=True, exist_ok=True)
    rows = bench.out / "rows.json"
    plan = Plan(
        operations=bench.operations,
        sizes_bytes=bench.sizes_bytes,
        dtypes=bench.dtypes,
        rounds=bench.rounds,
        budget_s=bench.budget_s,
        out=str(rows.resolve()),
    )
    job = JobSpec(
        command=("braid.bench.comm_worker", msgspec.json.encode(plan).decode()),
        kind="module",
        num_ranks=bench.ranks,
        threads=1,
        log_dir=str(bench.out / "run"),
    )
    total = len(bench.dtypes) * len(bench.sizes_bytes) * len(set(bench.operations) - {"barrier"})
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console or RichConsole(stderr=True), transient=True
    ) as progress:
        bar = _Bar(progress, total + ("barrier" in bench.operations))
        outcome = Supervisor(bar).run(job)
    if not outcome.ok:
        raise ConfigError(str(outcome))
    report = CommReport(
        braid=__version__,
        torch=importlib.metadata.version("torch"),
        machine=_machine(),
        ranks=bench.ranks,
        rows=msgspec.json.decode(rows.read_bytes(), type=list[Row]),
    )
    (bench.out / "comm.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    rows.unlink()
    return report


def table(report: CommReport) -> Table:
    """Times in microseconds and ratios, one row per operation, dtype and size."""
    title = f"{report.ranks} ranks, {report.machine}, torch {report.torch}; median us, x = Gloo's time / ours"
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    grid.add_column("operation", no_wrap=True)
    grid.add_column("bytes", justify="right", no_wrap=True)
    for name in ("gloo", "braid", "x", "registered", "x"):
        grid.add_column(name, justify="right", no_wrap=True)
    one_dtype = len({row.dtype for row in report.rows if row.nbytes}) == 1
    for row in report.rows:
        cells = [_size(row.nbytes), f"{row.seconds['gloo'] * 1e6:,.0f}"]
        for name in ("braid", "registered"):
            if name in row.seconds:
                cells += [f"{row.seconds[name] * 1e6:,.1f}", f"{row.ratio[name]:.1f}"]
            else:
                cells += ["", ""]
        plain = one_dtype or not row.nbytes
        grid.add_row(row.operation if plain else f"{row.operation} {row.dtype}", *cells)
    return grid


def plot(report: CommReport, path: Path) -> Path:
    """Time over size for every operation, both axes logarithmic.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        msg = "expected matplotlib for the plot, found that it is not installed: pip install 'braid-train[bench]'"
        raise ConfigError(msg)
    figure_type = importlib.import_module("matplotlib.figure").Figure
    names = list(dict.fromkeys(row.operation for row in report.rows if row.nbytes))
    figure = figure_type(figsize=(4.2 * min(3, len(names)), 3.4 * -(-len(names) // 3)))
    for index, name in enumerate(names):
        axes = figure.add_subplot(-(-len(names) // 3), min(3, len(names)), index + 1)
        rows = [row for row in report.rows if row.operation == name]
        for library, style in (("gloo", "o--"), ("braid", "s-"), ("registered", "^-")):
            points = [(r.nbytes, r.seconds[library] * 1e6) for r in rows if library in r.seconds]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=library, markersize=4)
        axes.set(title=name, xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds")
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(f"{report.ranks} ranks, {report.machine}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    return path


def print_report(report: CommReport, out: Path) -> None:
    """Show the table and say where the files are."""
    console = RichConsole()
    console.print(table(report))
    console.print(f"rows  {out / 'comm.json'}")


def _machine() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{psutil.cpu_count()} cores {model}"


def _size(nbytes: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return str(nbytes) if nbytes else ""
