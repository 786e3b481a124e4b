"""One rank of `braid bench ddp`: training steps of one model by several wrappers, in turns.

    alone        no wrapper; both ranks compute at the same time
    silent       torch's DistributedDataParallel with gradient views and a hook that sends nothing
    gloo         the same over Gloo
    torch        the same over the backend "braid"
    braid        braid's DistributedDataParallel

The exposed communication of a wrapper is its extra time over `silent`. (The extra time of `silent`
over `alone`, copying gradients into buckets, is the same in torch's wrapper for every backend.)
Each wrapper has a separate copy of the model, with separate buckets, hooks and optimizer state. In
every round each wrapper takes one step, in a random order, because caches favour the wrapper that
ran before. Ranks begin a step together, and it lasts until the slowest rank is finished.
"""

from __future__ import annotations

import copy
import random
import statistics
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from braid.cli.bench.harness.rounds import in_rounds
from braid.cli.bench.workers.ddp_models import Job, job_of
from braid.comm import Group
from braid.context import init, shutdown
from braid.parallel.data_parallel import DistributedDataParallel

__all__ = ["LEAST_ROUNDS", "VARIANTS", "Case", "DDPPlan", "MeasuredCase", "main"]

LEAST_ROUNDS = 24
VARIANTS = ("alone", "silent", "gloo", "torch", "braid")
COMPARED = ("torch", "braid")  # each is compared with gloo
NUM_RESAMPLED = 400
LEARNING_RATE = 1e-4


class Case(msgspec.Struct, frozen=True):
    """One model with one batch size to measure.

    Attributes:
        model: Name in `ddp_models.MODEL_NAMES`.
        batch: Number of samples, sequences or images of a rank in a step.
    """

    model: str
    batch: int


class DDPPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        cases: Models and batches.
        rounds: Largest number of steps of each wrapper.
        budget_s: Approximate seconds for a case.
    """

    cases: tuple[Case, ...]
    rounds: int
    budget_s: float


class MeasuredCase(msgspec.Struct, kw_only=True):
    """Measured times of one model with one batch size.

    Attributes:
        model: Name of the model.
        num_params: Number of its parameters.
        batch: Batch of a rank.
        ranks: World size.
        step_s: Median seconds of a step, by variant; of the slowest rank.
        speedup: Gloo's step over the variant's, median of the rounds.
        gone: Share of Gloo's exposed communication that the variant saves; empty if Gloo has no
            exposed communication.
        gone_between: The 5th and 95th percentile of `gone` over rounds resampled with replacement,
            an uncertainty interval. Empty if Gloo's exposed communication is hardly more than
            noise.
        exposed_s: Seconds that a variant takes longer than `silent`, which sends nothing; mean of
            the rounds.
        spread: Lowest and highest speed-up of the rounds.
        rounds_s: Seconds of every step, by variant, from which the other figures are computed.
    """

    model: str
    num_params: int
    batch: int
    ranks: int
    step_s: dict[str, float]
    speedup: dict[str, float]
    gone: dict[str, float]
    gone_between: dict[str, tuple[float, float]]
    exposed_s: dict[str, float]
    spread: dict[str, tuple[float, float]]
    rounds_s: dict[str, list[float]]


class _Step:
    """Training steps of one wrapped copy of a model."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self._model = model
        self._job = job
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def __call__(self) -> None:
        loss = self._job.loss(self._model(self._job.inputs))
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def main(plan: DDPPlan) -> list[MeasuredCase] | None:
    """Measure everything; rank 0 returns the figures."""
    group = init()
    dist.init_process_group("gloo")
    over_braid = dist.new_group(backend="braid")
    measured = [_measure(group, over_braid, case, plan) for case in plan.cases]
    dist.destroy_process_group()
    shutdown()
    return measured if group.rank == 0 else None


def _measure(
    group: Group, over_braid: dist.ProcessGroup | None, case: Case, plan: DDPPlan
) -> MeasuredCase:
    job = job_of(case.model, case.batch, seed=group.rank)
    base = job.model
    models: dict[str, Any] = {
        "alone": copy.deepcopy(base),
        "silent": TorchDDP(copy.deepcopy(base), gradient_as_bucket_view=True),
        "gloo": TorchDDP(copy.deepcopy(base), gradient_as_bucket_view=True),
        "torch": TorchDDP(
            copy.deepcopy(base), process_group=over_braid, gradient_as_bucket_view=True
        ),
        "braid": DistributedDataParallel(base, process_group=group),
    }
    models["silent"].register_comm_hook(None, _send_nothing)
    steps = {variant: _Step(models[variant], job) for variant in VARIANTS}
    for step in steps.values():  # buckets are rebuilt, and storages adopted, in the first steps
        for _ in range(4):
            step()
    times = in_rounds(
        group,
        steps,
        rounds=plan.rounds,
        least_rounds=LEAST_ROUNDS,
        budget_s=plan.budget_s,
    )
    mean = {variant: statistics.fmean(seconds) for variant, seconds in times.items()}
    speedup = {}
    for variant in COMPARED:
        pairs = zip(times[variant], times["gloo"], strict=True)
        speedup[variant] = [g / t for t, g in pairs]
    return MeasuredCase(
        model=case.model,
        num_params=sum(p.numel() for p in base.parameters()),
        batch=case.batch,
        ranks=group.size,
        step_s={variant: statistics.median(t) for variant, t in times.items()},
        speedup={variant: statistics.median(r) for variant, r in speedup.items()},
        gone=shares_gone(times),
        gone_between=shares_between(times),
        exposed_s={variant: mean[variant] - mean["silent"] for variant in ("gloo", *COMPARED)},
        spread={variant: (min(r), max(r)) for variant, r in speedup.items()},
        rounds_s=times,
    )


def shares_gone(times: dict[str, list[float]]) -> dict[str, float]:
    """Compute the share of Gloo's extra time per step that each variant saves.

    The extra time is that over the variant `silent`, which sends nothing.

    The share is computed from means, because the time of a run is the sum of its steps, slow ones
    included. So the saved and the remaining share add up to 1. In a single round noise would
    dominate the quotient. Empty if Gloo has no extra time.
    """
    mean = {variant: statistics.fmean(seconds) for variant, seconds in times.items()}
    exposed = mean["gloo"] - mean["silent"]
    if exposed <= 0:
        return {}
    return {variant: (mean["gloo"] - mean[variant]) / exposed for variant in COMPARED}


def shares_between(times: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Return percentiles 5 and 95 of each variant's saved share of Gloo's communication time.

    Rounds are resampled; `shares_gone` defines the share.

    Empty if Gloo has no extra time in any of the samples.
    """
    numbers, rounds = random.Random(0), range(len(times["gloo"]))
    samples: dict[str, list[float]] = {variant: [] for variant in COMPARED}
    for _ in range(NUM_RESAMPLED):
        drawn = numbers.choices(rounds, k=len(rounds))
        shares = shares_gone({v: [t[i] for i in drawn] for v, t in times.items()})
        if not shares:
            return {}
        for variant, share in shares.items():
            samples[variant].append(share)
    percentiles = {v: statistics.quantiles(shares, n=20) for v, shares in samples.items()}
    return {variant: (p[0], p[-1]) for variant, p in percentiles.items()}


def _send_nothing(_state, bucket):  # type: ignore[no-untyped-def]
    """DDP communication hook that sends nothing: every rank keeps its local gradients."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
