"""Conversion of plans to training options, and comparison of predictions with a run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from braid.errors import ConfigError
from braid.launch.observe.passes import passes
from braid.launch.observe.run_directory import read_run
from braid.plan.pipedream import PipeDreamPlan
from braid.plan.plan_file import Plan
from braid.plan.profiling import MeasuredMachines, MeasuredModel, Profile
from braid.plan.search import (
    PART_NAMES,
    Ranking,
    Split,
    Training,
    fastest_mesh,
    find_splits,
)
from braid.train.config import TrainConfig
from braid.train.models import gpt_name
from braid.train.profile_request import ProfileRequest
from braid.train.profiling import cached_profile

__all__ = ["comparison", "followed", "mesh_here", "options_of", "ranking_here"]

WARM_UP = 2  # number of first steps that the comparison skips
ADAMW_STATES = 2
SPLITTING = (
    "mesh",
    "schedule",
    "microbatches",
    "balance",
    "recompute",
    "versions",
    "stage_replicas",
    "shard",
    "strategy",
    "servers",
)
SPREAD = (4, 2, 1)  # parts of a rank's rows in the micro-batches that are profiled


def ranking_here(
    config: TrainConfig, num_ranks: int, *, threads: int | None = None
) -> tuple[Ranking, str]:
    """Profile a training's GPT on ranks of this host, and return its splits sorted by time.

    `threads` is the number of threads of each rank; None for the launcher's choice.

    Returns:
        The splits, and a note if the profile came from the cache.

    Raises:
        ConfigError: The batch cannot be divided over the ranks.
    """
    batch = config.batch
    rows = sorted({max(1, batch // num_ranks // part) for part in SPREAD} | {batch})
    profile, note = _profiled(config, num_ranks, rows, threads)
    assert profile.host is not None, "profiles of several ranks have a host"
    machines = MeasuredMachines(profile.host)
    return find_splits(MeasuredModel(profile), machines, Training(batch)), note


def mesh_here(
    config: TrainConfig, num_ranks: int, shards: int, *, threads: int | None = None
) -> str:
    """Profile an elastic training's GPT on ranks of this host, and return their fastest mesh.

    Args:
        config: The training.
        num_ranks: Number of ranks.
        shards: Number of micro-batches of a step.
        threads: Number of threads of each rank; None for the launcher's choice.

    Raises:
        ConfigError: The batch cannot be divided, or the model does not fit.
    """
    if num_ranks == 1:
        return "dp=1"
    if config.batch % shards:
        msg = (
            f"--batch {config.batch} cannot be divided into {shards} micro-batches, one per rank: "
            f"use a multiple of {shards}"
        )
        raise ConfigError(msg)
    size = config.batch // shards
    parts = {size, max(1, size // config.microbatches)}
    profile, _ = _profiled(config, num_ranks, sorted(parts), threads)
    assert profile.host is not None, "profiles of several ranks have a host"
    wish = Split(shard=config.shard, schedule=config.schedule, microbatches=config.microbatches)
    machines = MeasuredMachines(profile.host)
    return fastest_mesh(MeasuredModel(profile), machines, Training(size), wish, shards)


def _profiled(
    config: TrainConfig, num_ranks: int, rows: Sequence[int], threads: int | None
) -> tuple[Profile, str]:
    """Return the profile of a training's GPT, and a note if it came from the cache."""
    return cached_profile(
        ProfileRequest(
            num_ranks=num_ranks,
            threads=threads,
            model=config.model,
            context=config.context,
            rows=tuple(rows),
            device=config.device,
            dtype=config.dtype,
        )
    )


def options_of(plan: Plan | PipeDreamPlan) -> dict[str, Any]:
    """Convert a plan to options of `TrainConfig`.

    Raises:
        ConfigError: The plan's model is not a GPT of `braid train`.
    """
    options: dict[str, Any]
    if isinstance(plan, PipeDreamPlan):
        options = {
            "mesh": f"pp={plan.num_ranks}",
            "balance": ",".join(map(str, plan.balance)),
            "versions": plan.versions,
            "stage_replicas": ",".join(map(str, plan.replicas)),
        }
        return options | ({"model": plan.model} if plan.model else {})
    if not plan.context:
        msg = (
            f"the plan is for {plan.model or 'another model'}, which braid train does not train: "
            "pass its sizes to braid.parallel.hybrid.HybridParallel"
        )
        raise ConfigError(msg)
    if (plan.dtype, plan.optimizer_states) != ("fp32", ADAMW_STATES):
        msg = (
            f"the plan is for {plan.dtype} and an optimizer with {plan.optimizer_states} states, "
            f"and braid train computes in fp32 with AdamW: make one with --dtype fp32 "
            f"--optimizer-states {ADAMW_STATES}"
        )
        raise ConfigError(msg)
    split = plan.split
    options = {
        "model": gpt_name(plan.model),
        "batch": plan.batch,
        "context": plan.context,
        "mesh": plan.mesh,
        "shard": plan.shard,
        "strategy": plan.strategy,
    }
    if "pp" in plan.mesh:
        options |= {"microbatches": plan.microbatches, "recompute": plan.recompute}
    if plan.versions:
        options |= {"versions": plan.versions}
    if split.pp > 1:
        options |= {"schedule": plan.schedule, "balance": ",".join(map(str, plan.balance))}
    return options | ({"servers": split.dp} if plan.strategy else {})


def followed(config: TrainConfig, plan: Plan | PipeDreamPlan) -> TrainConfig:
    """Return the configuration of a training that follows a plan.

    Raises:
        ConfigError: Another option contradicts the plan.
    """
    options, default = options_of(plan), TrainConfig()
    differing = []
    for name in dict.fromkeys((*options, *SPLITTING)):
        planned, value = options.get(name, getattr(default, name)), getattr(config, name)
        if value not in {planned, getattr(default, name)}:
            option = f"--{name.replace('_', '-')} {value}"
            if name == "mesh" and config.versions:  # it chooses a mesh
                option = f"--versions {config.versions}, which trains on {option}"
            differing.append(f"{option} (the plan has {planned or 'none'})")
    if differing:
        msg = f"these options contradict --plan, leave them out: {', '.join(differing)}"
        raise ConfigError(msg)
    return replace(config, **options)


def comparison(plan: Plan | PipeDreamPlan, log_dir: str | Path) -> list[str]:
    """Return lines that compare a plan's prediction with the steps of a run.

    Args:
        plan: Plan of the run.
        log_dir: Directory of the run's metrics.
    """
    predicted = plan.predicted if isinstance(plan, Plan) else None
    lines = Path(log_dir, "metrics.jsonl").read_text().splitlines()
    steps = [report for report in map(json.loads, lines) if report["kind"] == "step"][WARM_UP:]
    if predicted is None or not steps:
        return []
    measured_s = median(step["step_s"] for step in steps)
    error = predicted.seconds / measured_s - 1
    head = (
        f"predicted {1e3 * predicted.seconds:.4g} ms a step, measured {1e3 * measured_s:.4g} ms "
        f"({100 * error:+.1f} %)"
    )
    text = [head]
    parts = predicted.parts
    sends = ("tensor_s", "message_s", "gradient_s")
    causes = {
        "work": (sum(v for k, v in parts.items() if k not in {*sends, "bubble_s"}), "compute"),
        "waiting": (parts.get("bubble_s", 0.0), "wait"),
        "sending": (sum(parts.get(part, 0.0) for part in sends), "transfer"),
    }
    for cause, (seconds, share) in causes.items():
        own_s = median(step["step_s"] * step[share] for step in steps)
        text.append(
            f"  {cause:8} predicted {1e3 * seconds:.4g} ms, measured {1e3 * own_s:.4g} ms on rank 0"
        )
    if parts:
        largest = max(parts, key=lambda part: parts[part])
        text.append(f"  largest  {PART_NAMES[largest]}, {1e3 * parts[largest]:.4g} ms predicted")
    return [*text, *_actions(predicted.actions, log_dir)]


def _actions(predicted: Mapping[str, float], log_dir: str | Path) -> Iterator[str]:
    """Yield a line for each stage with the predicted and measured times of its actions."""
    if not predicted:
        return
    recorded = passes(read_run(Path(log_dir)).timelines)
    if not recorded:
        return
    measured = recorded[0].seconds
    by_stage: dict[int, list[str]] = defaultdict(list)
    for name, seconds in predicted.items():
        own_s = measured.get((name[0], int(name[1:])))
        if own_s is not None:
            words = f"{name} predicted {1e3 * seconds:.4g} ms, measured {1e3 * own_s:.4g} ms"
            by_stage[int(name[1:])].append(words)
    for stage in sorted(by_stage):
        yield f"  stage {stage:<2} {'; '.join(by_stage[stage])}"
