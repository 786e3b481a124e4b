"""Judge and show figures of `pipeline` beside formulas: live bytes, and a sweep.

The sweep varies the number of micro-batches of a batch. Small micro-batches have a small bubble and
many messages. The simulator chooses a number; its choice is good if a step with this number is
hardly longer than the shortest measured step.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.workers.pipeline_parts import Held, Swept
from braid.cli.bench.harness.options import MIB
from braid.cli.bench.harness.report import BenchVerdict
from braid.runtime.terminal_table import new_table

__all__ = ["held_table", "held_verdict", "plot_sweep", "sweep_table", "sweep_verdict"]

HELD_WITHIN = 0.1
OPTIMUM_WITHIN = 0.05
STYLES = {"measured": ("o-", "#4477aa"), "simulated": ("s--", "#ee6677")}


def held_verdict(held: Held) -> BenchVerdict:
    """Return the verdict on the live bytes of a schedule."""
    ratios = [a / b for a, b in zip(held.measured_bytes, held.formula_bytes, strict=True)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    claim = f"{_mode_text(held)}: live bytes within {HELD_WITHIN:.0%} of the formula"
    figure = f"measured {worst:.3f} of it at worst"
    return BenchVerdict(claim, figure, abs(worst - 1) <= HELD_WITHIN)


def held_table(rows: Sequence[Held]) -> Table:
    """Make a table with one row per schedule and one column per rank."""
    title = "most MiB of activations at a time: measured / micro-batches x bytes of one"
    ranks = range(len(rows[0].measured_bytes))
    grid = new_table(title, ("schedule",), [f"rank {rank}" for rank in ranks])
    for row in rows:
        pairs = zip(row.measured_bytes, row.formula_bytes, strict=True)
        texts = [f"{measured / MIB:.1f} / {formula / MIB:.1f}" for measured, formula in pairs]
        grid.add_row(_mode_text(row), *texts)
    return grid


def _mode_text(held: Held) -> str:
    return f"{held.schedule}{', recomputed' if held.recompute != 'never' else ''}"


def sweep_verdict(swept: Sequence[Swept]) -> BenchVerdict:
    """Return the verdict on the number of micro-batches that the simulator chooses."""
    best, chosen = _fastest(swept, "measured"), _fastest(swept, "simulated")
    longer = chosen.measured_s / best.measured_s - 1
    claim = (
        f"the simulated optimum of {chosen.num_microbatches} micro-batches: a step at most "
        f"{OPTIMUM_WITHIN:.0%} longer than with the best number, {best.num_microbatches}"
    )
    return BenchVerdict(claim, f"measured {longer:.1%}", longer <= OPTIMUM_WITHIN)


def sweep_table(machine: str, swept: Sequence[Swept]) -> Table:
    """Make a table with one row per number of micro-batches; both optima are marked."""
    title = f"{machine}; ms of a step over the number of micro-batches of one batch"
    heads = ("micro-batches", "rows", "F", "B", "message", "measured", "simulated", "error")
    grid = new_table(title, (), heads)
    grid.add_column("optimum")
    optima = {name: _fastest(swept, name) for name in STYLES}
    for row in swept:
        times = (row.forward_s, row.backward_s, row.message_s, row.measured_s, row.simulated_s)
        grid.add_row(
            str(row.num_microbatches),
            str(row.rows),
            *(f"{seconds * 1e3:.2f}" for seconds in times),
            f"{row.simulated_s / row.measured_s - 1:+.1%}",
            " and ".join(name for name, optimum in optima.items() if optimum is row),
        )
    return grid


def plot_sweep(swept: Sequence[Swept], title: str, path: Path) -> Path:
    """Plot the time of a step over the number of micro-batches; the optimum is marked.

    Args:
        swept: Figures of the sweep.
        title: Title of the picture.
        path: File, as PNG or SVG by its suffix.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(6.4, 4.0))
    axes = figure.add_subplot()
    numbers = [row.num_microbatches for row in swept]
    for name, (style, colour) in STYLES.items():
        times = [_step_ms(row, name) for row in swept]
        best = times.index(min(times))
        axes.plot(numbers, times, style, c=colour, label=name)
        circle = {"markersize": 14, "markerfacecolor": "none"}
        axes.plot(numbers[best], times[best], style[0], c=colour, **circle)
    best_row = _fastest(swept, "measured")
    axes.annotate(
        f"optimum: {best_row.num_microbatches}",
        (best_row.num_microbatches, _step_ms(best_row, "measured")),
        xytext=(0, 16),
        textcoords="offset points",
        ha="center",
    )
    axes.set(xscale="log", xlabel="micro-batches of one batch", ylabel="ms of a step")
    axes.set_xticks(numbers, labels=[str(number) for number in numbers])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    return path


def _step_ms(row: Swept, name: str) -> float:
    return 1e3 * (row.measured_s if name == "measured" else row.simulated_s)


def _fastest(swept: Sequence[Swept], name: str) -> Swept:
    return min(swept, key=lambda row: _step_ms(row, name))
