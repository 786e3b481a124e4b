"""`braid bench comm`: compare collectives with Gloo and MPI, as a table, as JSON and as a plot.

The same processes measure all libraries in one run (`workers.comm`): braid's `Group` called
directly, on ordinary tensors and on registered ones (`Group.empty`), and torch.distributed over
braid. They are compared with torch.distributed over Gloo and, if mpi4py and mpiexec are installed,
MPI (`workers.candidates`). Sizes are the bytes of the largest full buffer of a rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from braid.cli.bench.harness.options import Budget, Size
from braid.cli.bench.harness.ranks import run_here
from braid.cli.bench.harness.report import Benchmark, Report, check_minimums, unknown
from braid.cli.bench.workers.candidates import LIBRARIES
from braid.cli.bench.workers.comm import CommPlan, Row, main
from braid.errors import ConfigError
from braid.launch.supervise.spawning import spawned_command
from braid.runtime.terminal_table import new_table
from braid.runtime.text import bytes_text

__all__ = [
    "BENCH",
    "OPERATIONS",
    "CommBench",
    "CommReport",
    "plot",
    "table",
]

SHORT = 20  # numbers above are shown without decimals, because decimals are noise
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
STYLES = {"gloo": "o--", "mpi": "x--", "torch": "v-", "braid": "s-", "registered": "^-"}
HEADINGS = {
    "braid": "Group",
    "registered": "registered",
    "torch": "torch",
    "mpi": "MPI",
}
KNOWN_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int8",
    "uint8",
)  # dtypes of Gloo


class CommReport(Report, kw_only=True):
    """Measurements of collectives.

    Attributes:
        mpi: Name of the measured MPI; empty without MPI.
        explained: Text about the algorithms that braid chose, by number of ranks.
        rows: Measurements.
    """

    mpi: str
    explained: dict[str, str]
    rows: list[Row]


@dataclass(frozen=True, kw_only=True, slots=True)
class CommBench:
    """Measure collectives against Gloo and MPI, in turns in one run: table, JSON, plot.

    Attributes:
        ranks: World sizes, measured in this order.
        operations: Names in `OPERATIONS`.
        sizes_bytes: Bytes of the largest full buffer of a rank.
        dtypes: torch's names.
        rounds: Number of alternating rounds for each row.
        budget_s: Approximate seconds of one library in one round.
        out: Directory for `comm.json`, `comm.png` and the run's logs.
        no_plot: Do not draw `comm.png`. It is drawn if matplotlib is installed.
    """

    ranks: Annotated[tuple[int, ...], tyro.conf.arg(name="num-ranks", aliases=["-n"])] = (2,)
    operations: tuple[str, ...] = OPERATIONS
    sizes_bytes: Annotated[tuple[Size, ...], tyro.conf.arg(name="sizes")] = SIZES_BYTES
    dtypes: tuple[str, ...] = DTYPES
    rounds: int = 5
    budget_s: Budget = 0.1
    out: Path = Path("runs/bench-comm")
    no_plot: bool = False

    def __post_init__(self) -> None:
        problems = unknown("operation", self.operations, OPERATIONS)
        problems += unknown("dtype", self.dtypes, KNOWN_DTYPES)
        least = [("the number of ranks", n, 2) for n in self.ranks]
        least += [("the number of rounds", self.rounds, 1)]
        least += [("a size in bytes", size, 1) for size in self.sizes_bytes]
        check_minimums(least, problems)


class _Bar:
    """Collects the rows that rank 0 prints, and advances a progress bar for each row."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.explained = ""
        self.rows: list[Row] = []
        self._progress = progress
        self._task = progress.add_task("measuring", total=total)

    def on_line(self, text: str) -> None:
        """Parse a JSON object of rank 0, and advance the bar."""
        if text.startswith('{"explained"'):
            self.explained = str(msgspec.json.decode(text)["explained"])
        else:
            row = msgspec.json.decode(text, type=Row)
            self.rows.append(row)
            self._progress.update(self._task, advance=1, description=f"{row.operation} done")


def _measure_comm(bench: CommBench, console: RichConsole) -> CommReport:
    mpi = mpi_version()
    explained, rows = {}, []
    for ranks in bench.ranks:
        explanation, measured = _run_ranks(bench, ranks, with_mpi=bool(mpi), console=console)
        explained[str(ranks)] = explanation
        rows += measured
    report = CommReport(
        mpi=mpi,
        explained=explained,
        rows=rows,
    )
    if not bench.no_plot and importlib.util.find_spec("matplotlib") is not None:
        plot(report, bench.out / "comm.png")
    return report


def mpi_version() -> str:
    """Return the name of the installed MPI; empty if mpi4py or mpiexec is missing."""
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpiexec") is None:
        return ""
    printed = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, check=False)
    return printed.stdout.splitlines()[0].strip() if printed.stdout else ""


def _run_ranks(
    bench: CommBench, ranks: int, *, with_mpi: bool, console: RichConsole | None
) -> tuple[str, list[Row]]:
    libraries = LIBRARIES if with_mpi else tuple(name for name in LIBRARIES if name != "mpi")
    plan = CommPlan(
        operations=bench.operations,
        libraries=libraries,
        sizes_bytes=bench.sizes_bytes,
        dtypes=bench.dtypes,
        rounds=bench.rounds,
        budget_s=bench.budget_s,
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
        if with_mpi:
            _run_under_mpi(spawned_command(main, (plan,)), ranks, bar)
        else:
            run_here(ranks, main, plan, on_line=bar.on_line, log_dir=bench.out / f"run-{ranks}")
    return bar.explained, bar.rows


def _run_under_mpi(arguments: tuple[str, ...], ranks: int, bar: _Bar) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    options = ["--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    command = ["mpiexec", *options, sys.executable, "-m", *arguments]
    environment = {**os.environ, **variables, **allowed}
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(b"{"):
                    bar.on_line(line.decode())
        if process.returncode:
            errors.seek(0)
            msg = (
                f"the ranks of mpiexec ended with exit code {process.returncode}:\n{errors.read()}"
            )
            raise ConfigError(msg)


def table(report: CommReport) -> Table:
    """Make a table of microseconds and ratios, one row per operation, dtype and size."""
    libraries = [name for name in LIBRARIES[1:] if any(name in row.seconds for row in report.rows)]
    title = (
        f"{report.system}{', ' + report.mpi if report.mpi else ''}\n"
        "median us, x = Gloo's time / this one's. Group: called directly; registered: the same "
        "on tensors of Group.empty; "
        "torch: torch.distributed over braid"
    )
    heads = [head for name in libraries for head in (HEADINGS[name], "x")]
    grid = new_table(title, ("operation",), ("ranks", "bytes", "gloo", *heads))
    grid.collapse_padding = True
    one_dtype = len({row.dtype for row in report.rows if row.nbytes}) == 1
    for row in report.rows:
        plain = one_dtype or not row.nbytes
        cells = [row.operation if plain else f"{row.operation} {row.dtype}", str(row.ranks)]
        cells += [bytes_text(row.nbytes) if row.nbytes else "", f"{row.seconds['gloo'] * 1e6:,.0f}"]
        for name in libraries:
            known = name in row.seconds
            cells.append(_short(row.seconds[name] * 1e6) if known else "")
            cells.append(_short(row.ratio[name]) if known else "")
        grid.add_row(*cells)
    return grid


def _short(figure: float) -> str:
    """Format a number with its significant digits."""
    return f"{figure:.1f}" if figure < SHORT else f"{figure:,.0f}"


def plot(report: CommReport, path: Path) -> Path:
    """Plot time over size for every operation, both axes logarithmic; return the path."""
    figure_type = importlib.import_module("matplotlib.figure").Figure
    names = list(dict.fromkeys(row.operation for row in report.rows if row.nbytes))
    figure = figure_type(figsize=(4.2 * min(3, len(names)), 3.4 * -(-len(names) // 3)))
    for index, name in enumerate(names):
        axes = figure.add_subplot(-(-len(names) // 3), min(3, len(names)), index + 1)
        first = report.rows[0]
        rows = [
            row
            for row in report.rows
            if (row.operation, row.ranks, row.dtype) == (name, first.ranks, first.dtype)
        ]
        for library, style in STYLES.items():
            points = [(r.nbytes, r.seconds[library] * 1e6) for r in rows if library in r.seconds]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    style,
                    label=HEADINGS.get(library, library),
                    markersize=4,
                )
        axes.set(title=name, xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds")
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(f"{report.rows[0].ranks} ranks, {report.machine}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    return path


BENCH = Benchmark("comm", CommBench, _measure_comm, table, lambda report: report.explained.values())
