"""A ranking of splits as tables, sentences and one picture that compares the kinds of splits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rich.box import SIMPLE
from rich.table import Table

from braid.plan.failures import Failures, time_to_solution
from braid.plan.search.estimate import SplitEstimate, StepTimeEstimate
from braid.plan.search.planner import Ranking
from braid.plan.search.sensitivity import PART_NAMES
from braid.programs.schedule.bars import COLOURS, Bar, draw
from braid.runtime.text import seconds_text

__all__ = ["best_of_kinds", "comparison", "infeasible", "ranking_table"]

DAY_S = 86400.0
NEVER = Failures()
AXIS_NAMES = {
    "pp": "pipeline",
    "dp": "data parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "tp": "tensor parallel",
}
NUM_KINDS = 10  # in a picture
BUSY = 0.15  # relative spread of times above which the table mentions it


def ranking_table(ranking: Ranking, top: int, steps: int = 0, failures: Failures = NEVER) -> Table:
    """Return the fastest splits as a table.

    Args:
        ranking: Splits by time.
        top: Number of rows.
        steps: Number of steps of the training, for the column of its total time; 0 for no such
            column.
        failures: Rate of failures of ranks.
    """
    estimator = ranking.estimator
    model, machines = estimator.model, estimator.machines
    training = estimator.training
    title = (
        f"{model.model}, batch {training.batch} in {training.dtype}, {machines.num_ranks} ranks: "
        f"layers {model.origin}, machines {machines.origin}"
    )
    table = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("split", overflow="fold")
    for name in ("ms", "rows/s", "work", "idle", "sends", "GB", "MB", "days"):
        if name != "days" or steps:
            table.add_column(name, justify="right", no_wrap=True)
    for estimate in ranking.fitting[:top]:
        time = estimate.time
        sends = time.tensor_s + time.message_s + time.gradient_s
        levels = estimator.level_bytes(estimate.split).values()
        cells = [
            f"{1e3 * time.seconds:.4g}",
            f"{estimator.training.batch / time.seconds:.4g}",
            *(
                f"{100 * part / time.seconds:.0f}"
                for part in (time.compute_s, time.bubble_s, sends)
            ),
            f"{estimate.memory.nbytes / 1e9:.2f}",
            f"{max(levels, default=0.0) / 1e6:.4g}",
        ]
        if steps:
            solution = time_to_solution(steps * time.seconds, machines.num_ranks, failures)
            cells.append(f"{solution.seconds / DAY_S:.3g}")
        table.add_row(f"{estimate.split}{'' if estimate.simulated else ' *'}", *cells)
    table.caption = (
        "work, idle, sends: % of the step; GB of a rank; MB over a link of a step; * by closed "
        "forms, the rest simulated"
    )
    if model.spread > BUSY:
        table.caption += (
            f". Times of layers varied by ±{model.spread:.0%} while they were measured, as this "
            "host was busy: the order of splits is not sure where their times differ by less"
        )
    return table


def infeasible(ranking: Ranking, count: int = 3) -> Iterator[str]:
    """Yield lines that describe `count` splits too large for the memory, the fastest first."""
    limit = ranking.estimator.machines.memory_bytes
    kinds: dict[tuple[int, ...], SplitEstimate] = {}
    for estimate in sorted(ranking.too_large, key=lambda e: e.seconds):
        kinds.setdefault(tuple(estimate.split.axes.values()), estimate)
    for estimate in list(kinds.values())[:count]:
        memory = estimate.memory
        largest = max(memory._fields, key=lambda part: getattr(memory, part))
        yield (
            f"{estimate.split}: {memory.nbytes / 1e9:.3g} GB of {limit / 1e9:.3g} GB, "
            f"{getattr(memory, largest) / 1e9:.3g} GB of them for {largest}"
        )


def best_of_kinds(ranking: Ranking) -> dict[str, SplitEstimate]:
    """Return the fastest split of each kind, such as `pipeline x data parallel`, by kind."""
    kinds: dict[str, SplitEstimate] = {}
    for estimate in ranking.fitting:
        split = estimate.split
        axes = [axis for axis, size in split.axes.items() if size > 1]
        kind = " x ".join(AXIS_NAMES[axis] for axis in axes) or "one rank"
        kind = f"ZeRO-{split.shard}" if axes == ["dp"] and split.shard else kind
        kind = "parameter server" if split.strategy else kind
        kinds.setdefault(f"asynchronous {kind}" if split.versions else kind, estimate)
    return kinds


def comparison(ranking: Ranking) -> str:
    """Draw the fastest split of the ten fastest kinds as SVG: parts of its time, and memory."""
    kinds = dict(islice(best_of_kinds(ranking).items(), NUM_KINDS))
    colours = dict(zip(StepTimeEstimate._fields, COLOURS, strict=True))
    bars = []
    for lane, (kind, estimate) in enumerate(kinds.items()):
        start_s = 0.0
        for part, seconds in zip(StepTimeEstimate._fields, estimate.time, strict=True):
            title = f"{kind}, {estimate.split}: {PART_NAMES[part]} {seconds_text(seconds)}"
            bars.append(Bar(lane, start_s, start_s + seconds, colours[part], title))
            start_s += seconds
    estimator = ranking.estimator
    notes = [
        f"{1e3 * e.seconds:.4g} ms, {e.memory.nbytes / 1e9:.2f} GB  {e.split}"
        for e in kinds.values()
    ]
    short = ("compute", "bubble", "tensor", "messages", "gradients", "optimizer", "other")
    return draw(
        [kind.replace(" parallel", "" if " x " in kind else " parallel") for kind in kinds],
        bars,
        max((e.seconds for e in kinds.values()), default=1.0),
        legend=dict(zip(short, colours.values(), strict=True)),
        caption=(
            f"a step of {estimator.model.model}, batch {estimator.training.batch}, on "
            f"{estimator.machines.num_ranks} ranks: the fastest split of each kind"
        ),
        notes=notes,
    )
