"""Compare all-reduce between hosts with Gloo and the rate of the link.

It is measured on namespaces of this machine (`lab`), or on real hosts; always in one interleaved
run (`workers.net`).

The used fraction of a link is payload over time and rate. The payload is the number of bytes that
an all-reduce must send over each host's network card: 2 (h-1)/h l with h hosts and l bytes of the
tensor. Headers are not counted, so at most 1448 / 1514 = 95.6 % of Ethernet with 1500 bytes per
packet can be reached. Higher fractions come from a full token bucket (`lab`): only large tensors
show the rate of the link.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro
from rich.console import Console as RichConsole
from rich.table import Table

from benchmarks.lab import Lab, bucket_bytes
from benchmarks.workers.net import BASE, Plan, Row, main
from braid.cli.bench.harness.options import GBIT, KIB, MIB, Budget, Size
from braid.cli.bench.harness.ranks import Where, figures_there
from braid.cli.bench.harness.report import Benchmark, BenchVerdict, Report, check_minimums
from braid.launch import parse_hosts
from braid.runtime.terminal_table import new_table
from braid.runtime.text import bytes_text

__all__ = [
    "BENCH",
    "Case",
    "NetBench",
    "NetReport",
    "net_table",
    "places",
    "targets",
]

SIZES_BYTES = (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
WIRES = ("bf16", "int8", "topk:0.01")
SMALL_BYTES, LARGE_BYTES = 64 * KIB, 4 * MIB
DRAINS = 2  # size of the all-reduce that empties both buckets of a cable, in buckets


class Case(msgspec.Struct, kw_only=True):
    """Figures of one network.

    Attributes:
        hosts: Ranks by host, such as a:2,b:2.
        num_hosts: Number of hosts.
        ranks_per_host: Largest number of ranks of a host.
        gbit_per_s: Rate of each host's link; 0 if unknown.
        rows: Figures of each size.
    """

    hosts: str
    num_hosts: int
    ranks_per_host: int
    gbit_per_s: float
    rows: list[Row]

    def share(self, row: Row, name: str) -> float:
        """Return the used fraction of the link: payload over time and rate."""
        sent = 2 * (self.num_hosts - 1) / self.num_hosts * row.nbytes
        return sent * 8 / row.seconds[name] / (self.gbit_per_s * GBIT)

    def __str__(self) -> str:
        rate = f" at {self.gbit_per_s:g} Gbit/s" if self.gbit_per_s else ""
        return f"{self.num_hosts} hosts x {self.ranks_per_host}{rate}"


class NetReport(Report, kw_only=True):
    """Figures of all networks."""

    cases: list[Case]


@dataclass(frozen=True, kw_only=True, slots=True)
class NetBench:
    """Measure all-reduce between hosts against Gloo; as root, on network namespaces.

    Attributes:
        rates_gbit: Rates of links between namespaces, Gbit/s each.
        num_hosts: Number of namespaces.
        ranks_per_host: Numbers of ranks of each namespace, one case per number and rate.
        sizes_bytes: Sizes of the tensors, multiples of 4.
        wires: Compressed formats for the network to measure in addition to float32.
        turns: Smallest number of repetitions of each library.
        budget_s: Approximate seconds for one library and size.
        hosts: Real hosts, such as a:2,b:2, instead of namespaces.
        rsh: Command to reach the hosts; ssh when empty.
        link_gbit: Rate of their links, Gbit/s; 0 if unknown.
        out: Directory for `net.json` and the run's logs.
    """

    rates_gbit: tuple[float, ...] = (1.0, 10.0)
    num_hosts: int = 2
    ranks_per_host: tuple[int, ...] = (1, 2)
    sizes_bytes: Annotated[tuple[Size, ...], tyro.conf.arg(name="sizes")] = SIZES_BYTES
    wires: tuple[str, ...] = WIRES
    turns: int = 7
    budget_s: Budget = 1.0
    hosts: Annotated[str, tyro.conf.arg(aliases=["-H"])] = ""
    rsh: str = ""
    link_gbit: float = 0.0
    out: Path = Path("runs/bench-net")

    def __post_init__(self) -> None:
        least = [("the number of hosts", self.num_hosts, 2), ("the number of turns", self.turns, 1)]
        least += [("the number of ranks of a host", n, 1) for n in self.ranks_per_host]
        problems = [
            f"a rate must be more than 0 Gbit/s, got {rate:g}"
            for rate in self.rates_gbit
            if not 0 < rate < float("inf")
        ]
        problems += [
            f"a size must be a multiple of 4 bytes, got {n}"
            for n in self.sizes_bytes
            if n < 4 or n % 4
        ]
        if self.rsh and not self.hosts:
            problems.append(f"--rsh {self.rsh} needs hosts: name them with --hosts")
        check_minimums(least, problems)


def _measure_net(bench: NetBench, console: RichConsole) -> NetReport:
    cases: list[Case] = []
    for case in places(bench):
        with console.status(f"{case}: starting ranks") as status, reached(bench, case) as where:
            log_dir = bench.out / f"run-{len(cases)}"
            plan = Plan(
                sizes_bytes=bench.sizes_bytes,
                wires=bench.wires,
                turns=bench.turns,
                budget_s=bench.budget_s,
                drain_bytes=0 if bench.hosts else DRAINS * bucket_bytes(case.gbit_per_s * GBIT),
            )
            for row in figures_there(where, main, plan, Row, log_dir=log_dir):
                case.rows.append(row)
                status.update(f"{case}: {bytes_text(row.nbytes)} done")
        cases.append(case)
    return NetReport(cases=cases)


def places(bench: NetBench) -> list[Case]:
    """List the cases, without figures."""
    if bench.hosts:
        hosts = parse_hosts(bench.hosts)
        most = max(host.slots for host in hosts)
        rate = bench.link_gbit
        return [
            Case(
                hosts=bench.hosts,
                num_hosts=len(hosts),
                ranks_per_host=most,
                gbit_per_s=rate,
                rows=[],
            )
        ]
    return [
        Case(hosts="", num_hosts=bench.num_hosts, ranks_per_host=ranks, gbit_per_s=rate, rows=[])
        for ranks in bench.ranks_per_host
        for rate in bench.rates_gbit
    ]


@contextmanager
def reached(bench: NetBench, case: Case) -> Iterator[Where]:
    """Create the hosts of a case inside the context; remove its namespaces afterwards."""
    if case.hosts:
        yield Where(hosts=case.hosts, rsh=bench.rsh)
        return
    with Lab(case.num_hosts, case.gbit_per_s * GBIT) as lab:
        where = lab.where(case.ranks_per_host)
        case.hosts = where.hosts
        yield where


def targets(report: NetReport) -> list[BenchVerdict]:
    """Return the verdicts on the targets for the measured cases, each with its worst figure."""
    all_targets = []
    for case in report.cases:
        shape = (case.num_hosts, case.ranks_per_host, case.gbit_per_s)
        small = [row for row in case.rows if row.nbytes <= SMALL_BYTES]
        large = [row for row in case.rows if row.nbytes >= LARGE_BYTES]
        middle = [row for row in case.rows if row.nbytes <= MIB]
        from_mib = [row for row in case.rows if row.nbytes >= MIB]
        above = [row for row in case.rows if row.nbytes > MIB]
        if shape[:2] == (2, 1):
            all_targets += _worst(case, small, f"up to {bytes_text(SMALL_BYTES)}", 2.0)
        if shape == (2, 1, 1.0) and large:
            row = min(large, key=lambda row: case.share(row, "braid"))
            what = f"{case}, payload, from {bytes_text(LARGE_BYTES)}"
            share = case.share(row, "braid")
            all_targets.append(_target(what, 0.95, share, row, "{:.1%} of the link"))
        if shape == (2, 1, 10.0):
            all_targets += _worst(case, large, f"from {bytes_text(LARGE_BYTES)}", 0.95)
        if shape == (2, 2, 1.0):
            all_targets += _worst(case, middle, f"up to {bytes_text(MIB)}", 1.4)
            all_targets += _worst(case, above, f"above {bytes_text(MIB)}", 1.2)
            all_targets += _worst(case, from_mib, f"from {bytes_text(MIB)}", 2.2, name="bf16")
    return all_targets


def _worst(
    case: Case, rows: list[Row], sizes: str, floor: float, *, name: str = "braid"
) -> list[BenchVerdict]:
    rows = [row for row in rows if name in row.ratio]
    if not rows:
        return []
    row = min(rows, key=lambda row: row.ratio[name])
    what = f"{case}, {'all digits' if name == 'braid' else name}, {sizes}"
    return [_target(what, floor, row.ratio[name], row)]


def _target(
    what: str, floor: float, worst: float, row: Row, text: str = "{:.2f} x Gloo"
) -> BenchVerdict:
    figure = f"measured {text.format(worst)} at {bytes_text(row.nbytes)}"
    return BenchVerdict(f"{what}: at least {text.format(floor)}", figure, worst >= floor)


def net_table(report: NetReport) -> Table:
    """Make a table with one row per case and size."""
    title = (
        f"all-reduce of float32, {report.place}; us, x: Gloo's time over this one's, %: payload "
        "over time and rate"
    )
    rows = [row for case in report.cases for row in case.rows]
    wires = [name for row in rows for name in row.ratio if name != "braid"]
    heads = ["bytes", "Gloo", "%", "braid", "x", "%"]
    names = list(dict.fromkeys(wires))
    grid = new_table(title, ("network",), [*heads, *(f"{name} x" for name in names)])
    for case in report.cases:
        for number, row in enumerate(case.rows):
            cells = [str(case) if not number else "", bytes_text(row.nbytes)]
            for name in (BASE, "braid", *names):
                known = name in row.seconds
                if name not in names:
                    cells.append(f"{row.seconds[name] * 1e6:,.0f}" if known else "")
                if name != BASE:
                    cells.append(f"{row.ratio[name]:.2f}" if known else "")
                if name in {BASE, "braid"}:
                    has_share = case.gbit_per_s > 0 and row.nbytes >= LARGE_BYTES
                    cells.append(f"{case.share(row, name):.1%}"[:-1] if has_share else "")
            grid.add_row(*cells)
    return grid


BENCH = Benchmark("net", NetBench, _measure_net, net_table, targets)
