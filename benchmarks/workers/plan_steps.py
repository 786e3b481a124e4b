"""A rank of `plan`: predicted and measured steps of each split.

The speed of a shared machine drifts by more than the error of a prediction. So model and ranks are
profiled again in each round, next to the steps, and medians of the rounds are compared.
"""

from __future__ import annotations

import io
import statistics
import time

import torch

from benchmarks.workers.plan_plan import StepError, Steps, StepsPlan
from braid import context
from braid.comm import Group
from braid.comm.autograd.layer_costs import PeakBytes
from braid.plan.plan_file import Plan
from braid.plan.profiling import (
    MeasuredMachines,
    MeasuredModel,
)
from braid.plan.search import Estimator, Split, Training, rescore
from braid.train.config import TrainConfig
from braid.train.corpus import Corpus, standard_library
from braid.train.device import compute_deterministically
from braid.train.loop import Stopping, Trainer
from braid.train.planned import options_of
from braid.train.profile_request import ProfileRequest
from braid.train.profile_worker import measured
from braid.train.reports import Reporter

__all__ = ["main"]

STEPS = 2  # of each training in each round


def splits_of(num_ranks: int, microbatches: int) -> list[Split]:
    """Return the splits to measure: each kind, and the schedules that differ most."""
    n, m = num_ranks, microbatches
    alone = [
        Split(dp=n),
        Split(dp=n, shard=1),
        Split(dp=n, shard=3),
        Split(dp=n, microbatches=2),
        Split(tp=n),
        Split(pp=n, microbatches=m),
        Split(pp=n, microbatches=m, recompute="always"),
        Split(pp=n, microbatches=2, schedule="gpipe"),
        Split(pp=n, microbatches=m, schedule="zb_h1"),
    ]
    if n < 4:
        return alone
    mixed = [Split(pp=2, dp=n // 2, microbatches=m), Split(dp=n // 2, tp=2)]
    return [*alone[:3], *mixed, *alone[5:7]]


def trainer_of(
    split: Split, estimator: Estimator, steps: Steps, corpus: Corpus, group: Group
) -> Trainer:
    """Return the trainer of `braid train --plan` for a split."""
    plan = Plan.of(estimator, estimator.estimate(split), context=steps.context)
    config = TrainConfig(**options_of(plan), steps=1 << 20, eval_every=0)
    reporter = Reporter(None, io.StringIO(), group.context.clock)
    return Trainer(config, corpus, group, reporter, Stopping())


def measure(steps: Steps, group: Group, corpus: Corpus) -> list[StepError]:
    """Return predicted and measured steps of one model."""
    rows = tuple(
        sorted({max(1, steps.batch // (4 * group.size)), steps.batch // group.size, steps.batch})
    )
    request = ProfileRequest(
        model=steps.model, context=steps.context, rows=rows, seconds=steps.profile_s
    )

    def estimator_now() -> Estimator:
        profile = measured(request, group)
        assert profile.host is not None, "all ranks measured"
        machines = MeasuredMachines(profile.host)
        return Estimator(MeasuredModel(profile), machines, Training(steps.batch))

    estimator = estimator_now()
    splits = [
        split
        for split in splits_of(group.size, steps.microbatches)
        if split.num_stages <= estimator.model.num_layers
        and steps.batch % (split.dp * split.microbatches) == 0
        and split.tp in estimator.model.tensor_sizes
    ]
    trainers = [trainer_of(split, estimator, steps, corpus, group) for split in splits]
    peaks = []
    for trainer in trainers:
        trainer.one_step()
        with PeakBytes(trainer.tensors()) as noted:
            trainer.one_step()
        peak_bytes = torch.tensor(float(noted.live.peak_bytes), dtype=torch.float64)
        peaks.append(float(group.all_reduce(peak_bytes, "max")))
    predicted_s: list[list[float]] = [[] for _ in splits]
    measured_s: list[list[float]] = [[] for _ in splits]
    for _ in range(steps.rounds):
        estimator = estimator_now()
        for n, (split, trainer) in enumerate(zip(splits, trainers, strict=True)):
            predicted_s[n].append(rescore(estimator, estimator.estimate(split)).seconds)
            trainer.one_step()  # the other trainings have used caches and memory
            for _ in range(STEPS):
                group.barrier()
                begin = time.perf_counter()
                trainer.one_step()
                group.barrier()
                measured_s[n].append(time.perf_counter() - begin)
    return [
        StepError(
            model=steps.name,
            ranks=group.size,
            split=str(split),
            predicted_s=statistics.median(predicted_s[n]),
            measured_s=statistics.median(measured_s[n]),
            predicted_bytes=estimator.estimate(split).memory.nbytes,
            measured_bytes=peaks[n],
        )
        for n, split in enumerate(splits)
    ]


def main(plan: StepsPlan) -> list[StepError] | None:
    """Run one rank; rank 0 returns the errors."""
    compute_deterministically()  # as braid train does
    group = context.init()
    corpus = standard_library()
    errors = [error for steps in plan.steps for error in measure(steps, group, corpus)]
    context.shutdown()
    return errors if group.rank == 0 else None
