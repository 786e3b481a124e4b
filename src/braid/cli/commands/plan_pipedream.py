"""`braid plan pipedream`: stages of an asynchronous pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from braid.cli.commands.typed import bytes_in, check_place
from braid.runtime.option_types import shown_as

if TYPE_CHECKING:
    from braid.plan.pipedream import ProfiledGraph

__all__ = ["plan_pipedream"]


def plan_pipedream(
    profile: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROFILE")],
    *,
    machines: tuple[int, ...],
    bandwidth: tuple[float, ...] = (1e9,),
    recurrence: Literal["paper", "released"] = "paper",
    straight: bool = False,
    memory: Annotated[str, shown_as("BYTES")] = "",
    optimizer_states: int = 2,
    rows: int = 8,
    plan: str = "",
    out: str = "",
) -> int:
    """Divide a profiled graph of PipeDream into the stages of its asynchronous pipeline.

    Prints the stages, and how much faster the pipeline is than one machine and than data
    parallelism, by PipeDream's cost model.

    Args:
        profile: Profile of `braid profile`; or a graph of PipeDream's profiler (stages in it are
            ignored).
        machines: Number of machines; or GPUs per server and number of servers, such as 4 2.
        bandwidth: Bytes per second between two machines; one value per level.
        recurrence: Dynamic program in the paper, or in the released code.
        straight: Give each stage one machine.
        memory: Memory of a machine, such as 16G (default: any).
        optimizer_states: States of the optimizer for each parameter: 1 for momentum, 2 for Adam.
        rows: Rows of a micro-batch, for a profile of `braid profile`.
        plan: File for the plan, for `braid train --plan`; needs a profile of `braid profile`.
        out: File for the graph with the stage of each node, for PipeDream's code generator.
    """
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from braid.errors import ConfigError
    from braid.plan.pipedream import (
        MachineLevel,
        MemoryLimit,
        PipeDreamPlan,
        format_graph,
        partition,
        states_of,
    )
    from braid.train.config import MODELS

    if len(machines) != len(bandwidth):
        msg = (
            f"--machines has {len(machines)} levels, but --bandwidth has {len(bandwidth)}: give "
            "both for each level, the innermost first"
        )
        raise ConfigError(msg)
    if optimizer_states < 0:
        msg = f"--optimizer-states must not be negative, got {optimizer_states}"
        raise ConfigError(msg)
    for file in filter(None, (plan, out)):
        check_place(file)
    levels = [MachineLevel(*level) for level in zip(machines, bandwidth, strict=True)]
    limit = MemoryLimit(bytes_in(memory), optimizer_states) if memory else None
    graph, model = _graph_of(profile, rows)
    if plan and not model:
        msg = (
            f"--plan needs a profile with layers, but {profile} has none: make one with `braid "
            "profile`"
        )
        raise ConfigError(msg)
    states = states_of(graph)
    split = partition(states, levels, recurrence=recurrence, straight=straight, memory=limit)
    described = " x ".join(f"{m} at {b / 1e9:g} GB/s" for m, b in levels)
    table = Table(title=f"{profile}, {recurrence}\nmachines: {described}")
    for title in ("stage", "machines", "nodes", "compute ms", "parameters MB", "first", "last"):
        table.add_column(title, justify="left" if title in {"first", "last"} else "right")
    for number, stage in enumerate(split.stages):
        nodes = [graph.nodes[name] for name in graph.order() if name in stage.nodes]
        seconds = sum(node.forward_s + node.backward_s for node in nodes)
        table.add_row(
            str(number),
            str(stage.replicas),
            str(len(nodes)),
            f"{1e3 * seconds:.1f}",
            f"{sum(node.param_bytes for node in nodes) / 1e6:.1f}",
            nodes[0].text.partition("(")[0],
            nodes[-1].text.partition("(")[0],
        )
    console = Console()
    console.print(table)
    if split.seconds:
        print(
            f"{1e3 * split.seconds:.2f} ms per minibatch: "
            f"{split.one_machine_s / split.seconds:.2f} times as fast as one machine, "
            f"{split.data_parallel_s / split.seconds:.2f} times as fast as data parallelism"
        )
    if plan:
        PipeDreamPlan.of(split, model).write(plan)
        hint = f"; train with braid train --model {model} --plan {plan}" if model in MODELS else ""
        print(f"{plan}: the plan{hint}")
    if out:
        stage_of = {name: n for n, stage in enumerate(split.stages) for name in stage.nodes}
        staged = graph._replace(
            nodes={
                name: node._replace(stage=stage_of.get(name, 0))
                for name, node in graph.nodes.items()
            }
        )
        Path(out).write_text(format_graph(staged))
        print(f"{out}: the graph with its stages")
    return 0


def _graph_of(profile: str, rows: int) -> tuple[ProfiledGraph, str]:
    """Return the graph in a file, and the model's name if `braid profile` wrote the file."""
    from pathlib import Path

    from braid.errors import ConfigError
    from braid.plan.pipedream import parse_graph
    from braid.plan.profiling import read_profile

    if rows < 1:
        msg = f"--rows must be at least 1, got {rows}"
        raise ConfigError(msg)
    if profile.endswith(".json"):
        read = read_profile(profile)
        return read.as_graph(rows), read.model
    try:
        return parse_graph(Path(profile).read_text()), ""
    except OSError as exc:
        msg = f"cannot read {profile}: {exc.strerror}"
        raise ConfigError(msg) from exc
    except ConfigError as exc:
        msg = f"{profile}, {exc}"
        raise ConfigError(msg) from exc
