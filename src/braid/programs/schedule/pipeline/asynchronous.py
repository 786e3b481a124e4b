"""Asynchronous pipelines: 1F1B that never waits for the end of a batch, by versions of weights.

Problem: a synchronous pipeline waits at the end of each batch until all its gradients are there,
and has a bubble. An asynchronous one continues with the next micro-batch, and steps whenever a
gradient arrives. Weights change between the forward and the backward of a micro-batch.

Idea: weights have versions, and every action names the version that it uses. Version v of a stage
is its weights after v optimizer steps. A backward uses the version of its forward.

    stash           the newest version of each stage (PipeDream)
    vertical_sync   the version that was the newest of stage 0 when the micro-batch entered
    2bw             the version before the last, with a step every m >= p micro-batches, so that
                    two versions are enough (PipeDream-2BW)

    stash, 2 stages     0  F0~0 F1~0      B0~0 STEP0~1 F2~1      B1~0 STEP1~2
                        1       F0~0 B0~0 STEP0~1 F1~1 B1~1 STEP1~2 F2~2 ...

A stage may have replicas, which take turns with micro-batches (1F1B-RR); their gradients of a round
are added before each step. Stage s has w = (N - 1 - ranks before) // replicas forwards in advance,
so w + 1 versions, and its gradients are w steps old.

Sources: D. Narayanan et al., PipeDream, SOSP 2019, sections 3.2 and 3.3; D. Narayanan et al.,
Memory-efficient pipeline-parallel DNN training (2BW), ICML 2021.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, get_args

from braid.errors import raise_all
from braid.programs.schedule.pipeline.linear import StageWork, check_size, pipeline_program
from braid.programs.schedule.pipeline.versions import ASYNCHRONOUS
from braid.programs.schedule.program import Action, Program

__all__ = [
    "VersionRule",
    "asynchronous",
    "num_of_step",
    "oldest_ages",
    "pipedream",
    "pipedream_2bw",
    "pipedream_vertical_sync",
    "placement_of",
    "staleness",
]

VersionRule = Literal["stash", "vertical_sync", "2bw"]


def pipedream(num_stages: int, num_microbatches: int) -> Program:
    """Make PipeDream's program for one rank per stage: 1F1B with stashed weight versions."""
    return asynchronous((1,) * num_stages, num_microbatches)


def pipedream_vertical_sync(num_stages: int, num_microbatches: int) -> Program:
    """Make PipeDream's program with the weights that stage 0 had for each micro-batch."""
    return asynchronous((1,) * num_stages, num_microbatches, versions="vertical_sync")


def pipedream_2bw(num_stages: int, num_microbatches: int) -> Program:
    """Make a PipeDream-2BW program with one step per `num_stages` micro-batches."""
    return asynchronous((1,) * num_stages, num_microbatches, versions="2bw", every=num_stages)


def asynchronous(
    replicas: Sequence[int],
    num_microbatches: int,
    *,
    versions: VersionRule = "stash",
    every: int = 1,
) -> Program:
    """Make an asynchronous pipeline's program up to a flush, when all gradients have been used.

    Args:
        replicas: Number of ranks of each stage.
        num_microbatches: Number of micro-batches up to the flush.
        versions: Rule for the version of the weights that a forward uses.
        every: Number of micro-batches of a rank between two steps.

    Raises:
        ConfigError: A number is not positive, or the rule needs equal numbers of replicas in all
            stages. Or `every` is so small that the version before the last does not exist yet.
    """
    placement = placement_of(replicas)
    check_size(len(replicas), num_microbatches)
    _check(replicas, versions, every)
    ahead = [(sum(replicas[stage:]) - 1) // count for stage, count in enumerate(replicas)]
    entry: dict[int, int] = {}  # version of stage 0 for each micro-batch
    work: list[list[StageWork]] = []
    for stage, ranks in enumerate(placement):
        num_steps = -(-num_microbatches // (len(ranks) * every))
        for replica in range(len(ranks)):
            mine = range(replica, num_microbatches, len(ranks))
            steps, items = 0, []
            version: dict[int, int] = {}
            for position in range(-min(ahead[stage], len(mine)), len(mine)):
                if 0 <= (going := position + min(ahead[stage], len(mine))) < len(mine):
                    i = mine[going]
                    version[i] = _version(versions, i, steps, entry, every * len(ranks))
                    if not stage:
                        entry[i] = steps
                    items.append(StageWork("F", stage, i, version[i]))
                if position >= 0:
                    i = mine[position]
                    items.append(StageWork("B", stage, i, version[i]))
                    if (position + 1) % every == 0 or position + 1 == len(mine):
                        steps += 1
                        items.append(StageWork("STEP", stage, i, steps))
            if steps < num_steps:  # a last round in which others have micro-batches
                items.append(StageWork("STEP", stage, num_microbatches - 1, steps + 1))
            work.append(items)
    name = "pipedream" if versions == "stash" else f"pipedream_{versions}"
    return pipeline_program(name, work, placement, num_microbatches, vocabulary=ASYNCHRONOUS)


def placement_of(replicas: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of each stage, in the order of stages."""
    ends = accumulate(replicas, initial=0)
    return [tuple(range(first, end)) for first, end in pairwise(ends)]


def num_of_step(action: Action, replicas: int, every: int, num_microbatches: int) -> int:
    """Return the number of micro-batches, of all replicas, whose gradients a STEP uses.

    Args:
        action: The STEP.
        replicas: Number of replicas of the stage.
        every: Number of micro-batches of a replica between two steps.
        num_microbatches: Number of micro-batches of the program.
    """
    per_step = replicas * every
    return min(per_step, num_microbatches - (action.version - 1) * per_step)


def staleness(program: Program) -> dict[int, Counter[int]]:
    """Count each stage's gradients by age: the number of steps since their forward."""
    ages: dict[int, Counter[int]] = {}
    for actions in program.ranks:
        waiting: dict[int, list[int]] = {}  # versions of gradients, by stage
        for action in actions:
            if action.kind == "B":
                waiting.setdefault(action.unit, []).append(action.version)
            elif action.kind == "STEP":
                counter = ages.setdefault(action.unit, Counter())
                counter.update(action.version - 1 - v for v in waiting.pop(action.unit, []))
    return ages


def oldest_ages(program: Program) -> tuple[int, ...]:
    """Return the age of the oldest gradient of each stage.

    >>> oldest_ages(pipedream(3, 6))
    (2, 1, 0)
    """
    return tuple(max(counter) for _, counter in sorted(staleness(program).items()))


def _check(replicas: Sequence[int], versions: str, every: int) -> None:
    problems = []
    if any(count < 1 for count in replicas) or every < 1:
        problems.append(
            f"replicas of each stage and every must be at least 1, got replicas {list(replicas)} "
            f"and every {every}"
        )
    if versions not in get_args(VersionRule):
        known = ", ".join(get_args(VersionRule))
        problems.append(f"versions must be one of {known}, got {versions!r}")
    if versions != "stash" and len(set(replicas)) > 1:
        problems.append(
            f"{versions} needs the same number of replicas of every stage, got {list(replicas)}: "
            'use versions="stash"'
        )
    if versions == "2bw" and every < len(replicas):
        problems.append(
            f"versions '2bw' needs every to be at least {len(replicas)} micro-batches, one for "
            f"each stage, got {every}"
        )
    raise_all(problems)


def _version(rule: str, i: int, steps: int, entry: dict[int, int], per_step: int) -> int:
    """Return the version that a forward uses, after `steps` of its stage."""
    if rule == "2bw":
        return max(0, i // per_step - 1)
    return entry.get(i, steps) if rule == "vertical_sync" else steps
