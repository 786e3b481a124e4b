"""`braid schedule ...`: print, validate, simulate and compare programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from braid.cli.commands.typed import bytes_in, check_place
from braid.errors import ConfigError
from braid.runtime.option_types import Number, shown_as

if TYPE_CHECKING:
    from rich.console import Console

    from braid.programs.schedule import Costs, Program, Timeline
    from braid.programs.schedule.collective import Rounds
    from braid.programs.topology import Cluster

__all__ = ["schedule_check", "schedule_compare", "schedule_show", "schedule_simulate"]

Name = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
Explained = Annotated[str, shown_as("STR")]
NO_TERMINAL_WIDTH = 120
MOST_DRAWN = 256  # largest number of ranks with a timeline; for more, only rounds are computed


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOptions:
    """A program: the name of an algorithm, or a file.

    Attributes:
        name: Name of the algorithm, or a file: a program as `braid schedule show` prints it, or
            CSV of torch's pipelining.
        ranks: World size, or number of stages; not used with a file.
        operation: Collective to run (default: all_reduce if the algorithm supports it).
        root: Root rank, for operations with a root (default: 0).
        row: Ranks per host, for hierarchical (default of `simulate`: size of the cluster's first
            level).
        microbatches: Number of micro-batches, for pipelines such as 1f1b.
    """

    name: Name
    ranks: int = 4
    operation: Explained = ""
    root: Number = None
    row: Number = None
    microbatches: int = 8

    def is_in_file(self) -> bool:
        """Return whether `name` is a file; an algorithm of the same name has priority."""
        from braid.programs.schedule.collective import ALGORITHMS
        from braid.programs.schedule.files import is_file
        from braid.programs.schedule.pipeline import find_schedule

        is_known = find_schedule(self.name) or self.name in {known for known, _ in ALGORITHMS}
        if is_known or not is_file(self.name):
            return False
        if self.operation or self.root is not None or self.row is not None:
            msg = (
                f"--operation, --root and --row do not apply to the file {self.name}, which "
                "defines the operation: leave them out"
            )
            raise ConfigError(msg)
        return True

    def rounds(self, row: int | None) -> Rounds:
        """Return the rounds of a collective; `row` is the number of ranks per host."""
        from braid.programs.schedule.collective import ALGORITHMS, algorithm
        from braid.programs.schedule.pipeline import ALL_SCHEDULES

        operations = [operation for known, operation in ALGORITHMS if known == self.name]
        if not operations:
            names = sorted({known for known, _ in ALGORITHMS})
            msg = (
                f"{self.name} is not an algorithm or a file: choose one of {', '.join(names)}, "
                f"{', '.join(ALL_SCHEDULES)}, or name a file"
            )
            raise ConfigError(msg)
        main = "all_reduce" if "all_reduce" in operations else operations[0]
        return algorithm(self.name, self.operation or main, self.ranks, root=self.root, row=row)

    def program(self, row: int | None) -> Program:
        """Return the program of an algorithm; `row` is the number of ranks per host."""
        from braid.programs.schedule.collective import program
        from braid.programs.schedule.pipeline import find_schedule

        pipeline = find_schedule(self.name)
        if pipeline is None:
            return program(self.rounds(row))
        if self.operation or self.root is not None:
            msg = f"--operation and --root do not apply to the pipeline {self.name}: leave them out"
            raise ConfigError(msg)
        return pipeline(self.ranks, self.microbatches)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Options for the costs of messages: a cluster file, or latency and bandwidth.

    Attributes:
        cluster: TOML file of the cluster (default: all ranks at one switch, with the latency and
            bandwidth below).
        latency_us: Microseconds before the first byte.
        gbytes_per_s: Bandwidth of a rank's link, in 10^9 bytes per second.
    """

    cluster: Explained = ""
    latency_us: float = 5.0
    gbytes_per_s: float = 10.0

    def of(self, ranks: int) -> Cluster:
        """Return the cluster of the file, or a switch with this number of ranks."""
        from braid.programs.topology import flat, read_cluster

        if self.cluster:
            return read_cluster(self.cluster)
        return flat(ranks, self.latency_us * 1e-6, self.gbytes_per_s * 1e9)


SIMULATED = ProgramOptions(name=tyro.MISSING, ranks=8)


def schedule_show(
    options: Annotated[ProgramOptions, tyro.conf.arg(name="")],
    *,
    table: bool = False,
    csv: bool = False,
    svg: str = "",
) -> int:
    """Print a program, such as ring, tree, hierarchical, 1f1b, zbv or v_half.

    Args:
        options: Program to print.
        table: Draw a table of rounds instead.
        csv: Print CSV for torch's pipelining instead, also for `braid train --schedule FILE.csv`.
        svg: File for a picture of the rounds of a collective: its blocks, step by step.
    """
    from braid.programs.schedule import to_text
    from braid.programs.schedule.files import read_program, valid_program
    from braid.programs.schedule.pipeline import to_csv

    if table + csv + bool(svg) > 1:
        msg = "--table, --csv and --svg are forms of the same program: choose one"
        raise ConfigError(msg)
    in_file = options.is_in_file()
    read = valid_program if svg else read_program
    program = read(options.name) if in_file else options.program(options.row)
    if svg:
        _write_rounds(svg, program)
    elif csv:
        print(to_csv(program), end="")
    elif table:
        _print_table(_wide_console(), program)
    else:
        print(to_text(program), end="")
    return 0


def _write_rounds(file: str, program: Program) -> None:
    from braid.programs.schedule.blocks import blocks_svg

    if _is_pipeline(program):
        msg = (
            f"{program} has no rounds to draw: use braid schedule simulate --svg, which draws it "
            "over time"
        )
        raise ConfigError(msg)
    _write(file, blocks_svg(program))
    print(f"picture  {file}")


def schedule_check(
    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")],
) -> int:
    """Validate a program: matching, deadlock, every contribution exactly once.

    Args:
        file: Program, as `braid schedule show` prints it, or CSV of torch's pipelining.
    """
    from braid.programs.schedule import validate
    from braid.programs.schedule.files import read_program
    from braid.programs.schedule.known import RULES

    program = read_program(file)
    violations = validate(program, RULES)
    for violation in violations:
        print(violation)
    if not violations:
        print(f"valid: {program}")
    return 1 if violations else 0


def schedule_simulate(
    options: Annotated[ProgramOptions, tyro.conf.arg(name="")] = SIMULATED,
    *,
    nbytes: str = "64Mi",
    cluster: Annotated[ClusterOptions, tyro.conf.arg(name="")],
    forward_ms: float = 1.0,
    backward_ms: float = 2.0,
    svg: Explained = "",
    trace: Explained = "",
) -> int:
    """Compute how long a program takes on a cluster, and draw its timeline.

    Args:
        options: Program to simulate.
        nbytes: For a collective, bytes of a rank's largest buffer, such as 64Mi or 1G; for a
            pipeline, bytes of a micro-batch's activations.
        cluster: Costs of messages.
        forward_ms: Milliseconds of the forward pass of a micro-batch on a rank.
        backward_ms: Milliseconds of the backward pass of a micro-batch on a rank; schedules that
            split backward use half of it for the weights.
        svg: File for a picture.
        trace: File for Perfetto (ui.perfetto.dev) or chrome://tracing.
    """
    from braid.programs.schedule.files import valid_program
    from braid.programs.schedule.pipeline import find_schedule

    for file in filter(None, (svg, trace)):
        check_place(file)
    times = {"--forward-ms": forward_ms, "--backward-ms": backward_ms}
    for option, value in times.items():
        if not 0 <= value < float("inf"):
            msg = f"{option} must be a number of milliseconds of at least 0, got {value}"
            raise ConfigError(msg)
    size = bytes_in(nbytes)
    if options.is_in_file():
        program = valid_program(options.name)
    else:
        net = cluster.of(options.ranks)
        row = net.levels[0].size if options.row is None else options.row
        if find_schedule(options.name) is None and options.ranks > MOST_DRAWN:
            if svg or trace:
                msg = (
                    f"a picture or a trace shows at most {MOST_DRAWN} ranks, and the program has "
                    f"{options.ranks}: leave --svg and --trace out"
                )
                raise ConfigError(msg)
            return _estimate(options.rounds(row), size, net)
        program = options.program(row)
    if program.num_ranks > MOST_DRAWN:
        msg = (
            f"at most {MOST_DRAWN} ranks can be drawn, but the program has {program.num_ranks}: "
            "choose fewer"
        )
        raise ConfigError(msg)
    net = cluster.of(program.num_ranks)
    net.check_size(program.num_ranks)
    costs = _costs(program, size, forward_ms * 1e-3, backward_ms * 1e-3)
    return _draw(program, costs, net, svg, trace)


def schedule_compare(
    operation: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(metavar="OPERATION")
    ] = "all_reduce",
    *,
    ranks: int = 1024,
    sizes: tuple[str, ...] = ("1Ki", "64Ki", "1Mi", "16Mi", "256Mi", "4Gi"),
    cluster: Annotated[ClusterOptions, tyro.conf.arg(name="")],
) -> int:
    """Show which algorithm is fastest for which size on a cluster, up to 100,000 ranks.

    Args:
        operation: Collective, such as all_reduce.
        ranks: World size.
        sizes: Bytes of the largest full buffer of a rank.
        cluster: Costs of messages.
    """
    from braid.programs.cost import compare
    from braid.runtime.terminal_table import new_table
    from braid.runtime.text import seconds_text

    if not sizes:
        msg = "--sizes lists no size: give at least one, such as 1Mi"
        raise ConfigError(msg)
    net = cluster.of(ranks)
    comparison = compare(operation, ranks, [bytes_in(size) for size in sizes], net)
    levels = ", ".join(f"{level.size} per {level.name}" for level in net.levels)
    print(f"{operation} on {ranks} ranks ({levels}); the fastest is marked *")
    grid = new_table(None, ["algorithm"], sizes)
    for name, estimates in comparison.estimates.items():
        marks = ["*" if comparison.is_best(name, i) else " " for i in range(len(sizes))]
        cells = (
            f"{seconds_text(e.seconds)}{mark}" for e, mark in zip(estimates, marks, strict=True)
        )
        grid.add_row(name, *cells)
    _wide_console().print(grid)
    for level in net.levels[1:]:
        if (times := net.oversubscription(level.name)) > 1:
            print(f"links to the {level.name} are oversubscribed {times:g} : 1")
    for name, why in comparison.left_out.items():
        print(f"left out: {name}, {why}")
    return 0


def _write(file: str, text: str) -> None:
    from pathlib import Path

    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as exc:
        msg = f"{file} cannot be written: {exc}; choose another path"
        raise ConfigError(msg) from exc


def _costs(program: Program, nbytes: int, forward_s: float, backward_s: float) -> Costs:
    from braid.programs.schedule import Costs
    from braid.programs.schedule.collective import collective_costs

    if _is_pipeline(program):
        share = program.num_ranks / program.header.num_units  # share of a rank's work in each stage
        half_s = backward_s / 2
        whole = {"F": forward_s, "B": backward_s, "I": half_s, "W": half_s}
        work = {kind: seconds * share for kind, seconds in whole.items()}
        return Costs(lambda _r, _a: nbytes, lambda _r, action: work.get(action.kind, 0.0))
    return collective_costs(program, nbytes)


def _is_pipeline(program: Program) -> bool:
    return program.vocabulary.name != "collective"


def _draw(program: Program, costs: Costs, net: Cluster, svg: str, trace: str) -> int:
    import json

    from braid.programs.schedule import simulate
    from braid.programs.schedule.pipeline import measures_text, peak_activations
    from braid.programs.schedule.plot import lanes, to_svg, to_trace
    from braid.runtime.text import seconds_text

    is_pipeline = _is_pipeline(program)  # sends of pipelines do not wait for a receive
    timeline = simulate(program, costs, net, buffered=is_pipeline)
    print(f"{program}: {seconds_text(timeline.seconds)}")
    for line in lanes(timeline, program.num_ranks):
        print(line)
    caption = measures_text(program, timeline) if is_pipeline else ""
    if caption:
        print(caption)
    _print_bytes(_by_level(timeline, net))
    if svg:
        notes = [f"peak {peak:g}" for peak in peak_activations(program)] if is_pipeline else []
        _write(svg, to_svg(timeline, program.num_ranks, caption=caption, notes=notes))
        print(f"picture  {svg}")
    if trace:
        _write(trace, json.dumps({"traceEvents": to_trace(timeline)}))
        print(f"trace    {trace}")
    return 0


def _estimate(rounds: Rounds, nbytes: int, net: Cluster) -> int:
    from braid.programs.cost import simulate_rounds
    from braid.runtime.text import seconds_text

    estimate = simulate_rounds(rounds, nbytes, net)
    print(
        f"{rounds.name} {rounds.operation} on {rounds.num_ranks} ranks, {rounds.num_rounds} "
        f"rounds: {seconds_text(estimate.seconds)}"
    )
    _print_bytes(estimate.level_bytes)
    return 0


def _by_level(timeline: Timeline, net: Cluster) -> dict[str, float]:
    by_level = {level.name: 0.0 for level in net.levels}
    for link, nbytes in timeline.link_bytes.items():
        by_level[net.level_of_link(link).name] += nbytes
    return by_level


def _print_bytes(by_level: dict[str, float]) -> None:
    for name, nbytes in by_level.items():
        print(f"bytes up and down the links to each {name}: {nbytes:,.0f}")


def _wide_console() -> Console:
    """Return a console with the terminal's width, or a wide one without a terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=NO_TERMINAL_WIDTH)


def _print_table(console: Console, program: Program) -> None:
    from braid.programs.schedule.plot import table
    from braid.runtime.terminal_table import new_table

    head, *rows = table(program)
    print(program)
    grid = new_table(None, head, ())
    for row in rows:
        grid.add_row(*row)
    console.print(grid)
