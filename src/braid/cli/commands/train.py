"""`braid train`: train a GPT, alone or in parallel."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import tyro

from braid.errors import ConfigError
from braid.runtime.option_types import Number, NumRanks, shown_as
from braid.train.config import TrainConfig

if TYPE_CHECKING:
    from braid.plan.pipedream import PipeDreamPlan
    from braid.plan.plan_file import Plan

__all__ = ["train"]

AUTO = "auto"


def train(
    config: Annotated[TrainConfig, tyro.conf.arg(name="")] = TrainConfig(),  # noqa: B008 - frozen
    *,
    n: NumRanks = None,
    resume: Annotated[str, shown_as("PATH")] = "",
    threads: Number = None,
    plan: Annotated[str, shown_as("FILE")] = "",
) -> int:
    """Train a GPT on bytes, on N ranks of this host.

    Ctrl-C and SIGTERM save a checkpoint at the next step (or flush) and print the command that
    resumes from it.

    Args:
        config: Model, data and training.
        n: Number of ranks (default: size of --mesh, else 1).
        resume: Checkpoint or run to resume from; auto for the last complete one.
        threads: OMP_NUM_THREADS of each rank (default: its current value, or physical cores / N).
        plan: Plan of `braid plan` or `braid plan pipedream`, instead of all options that split the
            training; auto to profile the model on N ranks and use the fastest plan; with
            --min-ranks, the fastest mesh of each number of ranks.
    """
    from rich.console import Console

    from braid.train import command

    config = replace(config, log_dir=config.log_dir or command.choose_log_dir(resume))
    if config.versions and not (config.mesh or config.reference_shards):
        config = replace(config, mesh=f"pp={n or 2}")
    planned = None
    if plan == AUTO and n is not None and config.min_ranks:
        config = replace(config, mesh=_elastic_meshes(config, n, threads))
    elif plan:
        from braid.train.planned import followed

        planned = _planned(plan, config, n, threads)
        whole_rates = replace(config, stale_lr_steps=0)  # the plan defines the pipeline
        config = replace(followed(whole_rates, planned), stale_lr_steps=config.stale_lr_steps)
        n = planned.num_ranks if n is None else n
    num_ranks = (config.meshes[0].size if config.mesh else 1) if n is None else n
    outcome = command.train(
        config, num_ranks=num_ranks, out=Console(), resume=resume, threads=threads
    )
    if not outcome.ok:
        print(outcome, file=sys.stderr, flush=True)
    elif planned is not None:
        from braid.train.planned import comparison

        for line in comparison(planned, config.log_dir):
            print(line)
    return outcome.exit_code


def _elastic_meshes(config: TrainConfig, n: int, threads: int | None) -> str:
    """Return the meshes with the fastest prediction for N ranks, and for fewer ones."""
    from rich.console import Console

    from braid.train.planned import mesh_here

    if config.mesh:
        msg = f"--mesh {config.mesh} contradicts --plan auto: leave one of them out"
        raise ConfigError(msg)
    if n < config.min_ranks:
        msg = f"-n {n} is less than --min-ranks {config.min_ranks}: start more ranks"
        raise ConfigError(msg)
    replace(config, mesh=f"dp={n}")  # refuses options that no mesh supports, before measuring
    meshes = []
    for num_ranks in range(n, config.min_ranks - 1, -1):
        with Console(stderr=True).status(f"measuring {config.model} on {num_ranks} ranks"):
            meshes.append(mesh_here(config, num_ranks, n, threads=threads))
    print(f"meshes with the fastest prediction: {'; '.join(meshes)}")
    return "; ".join(meshes)


def _planned(
    plan: str, config: TrainConfig, n: int | None, threads: int | None
) -> Plan | PipeDreamPlan:
    """Return the plan in a file, or with `auto` the plan with the fastest prediction."""
    from rich.console import Console

    from braid.plan.plan_file import Plan, read_plan
    from braid.plan.tables import ranking_table
    from braid.train.planned import ranking_here

    if plan == AUTO and n is None:
        msg = "--plan auto needs the number of ranks: add -n 2, or another"
        raise ConfigError(msg)
    if plan == AUTO and n is not None:
        with Console(stderr=True).status(f"measuring {config.model} on {n} ranks"):
            ranking, note = ranking_here(config, n, threads=threads)
        Console().print(ranking_table(ranking, 5))
        print(note, end="\n" * bool(note))
        return Plan.of(ranking.estimator, ranking.best, context=config.context)
    read = read_plan(plan)
    if isinstance(read, Plan) and n not in {None, read.num_ranks}:
        msg = f"{plan} is for {read.num_ranks} ranks, got -n {n}: make a plan for {n} ranks"
        raise ConfigError(msg)
    return read
