"""A rank of `plan`: predicted and measured steps of each split.

The speed of a shared machine drifts by more than the error of a prediction. So each profile and
each step is measured between two runs of a block of the model, in units of the block's time.
"""

from __future__ import annotations

import io
import statistics
import time
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.workers.plan_plan import StepError, Steps, StepsPlan
from braid import context
from braid.comm import Group
from braid.comm.autograd.layer_costs import PeakBytes
from braid.plan.plan_file import Plan
from braid.plan.profiling import (
    MeasuredMachines,
    MeasuredModel,
    PerRows,
    Profile,
    merged,
    profile_host,
)
from braid.plan.search import Estimator, Split, Training, rescore
from braid.train.config import MODELS, TrainConfig
from braid.train.corpus import Corpus, standard_library
from braid.train.loop import Stopping, Trainer
from braid.train.models import gpt
from braid.train.planned import options_of
from braid.train.profile_request import ProfileRequest
from braid.train.profile_worker import profiled_layers
from braid.train.reports import Reporter

__all__ = ["main"]

REPEATS = 2  # repetitions of the block that measures the speed of the machine


class _Speed:
    """Seconds of a block's forward and backward, on all ranks at the same time."""

    def __init__(self, group: Group, block: nn.Module, x: torch.Tensor) -> None:
        self._group, self._block, self._x = group, block, x
        self.seconds: list[float] = []

    def __call__(self) -> float:
        self._group.barrier()
        begin = time.perf_counter()
        for _ in range(REPEATS):
            self._block(self._x).sum().backward()
        elapsed = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        self.seconds.append(float(self._group.all_reduce(elapsed, "avg")))
        return self.seconds[-1]

    @property
    def usual(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)


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
    layers = gpt(steps.model, steps.context).named
    host = profile_host(group, [layer for _, layer in layers])
    x = torch.ones(steps.batch // group.size, steps.context, MODELS[steps.model].width)
    speed = _Speed(group, layers[1][1], x.requires_grad_())

    def profile() -> tuple[float, Profile]:
        before = speed()
        made = profiled_layers(request, group)
        return (before + speed()) / 2, msgspec.structs.replace(made, host=host)

    profiles = [profile()]
    estimator = _estimator([profiles[0][1]], steps)
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
    times: list[list[float]] = [[] for _ in splits]
    for _ in range(steps.rounds):
        profiles.append(profile())
        for trainer, own_times in zip(trainers, times, strict=True):
            for _ in range(2):
                before = speed()
                begin = time.perf_counter()
                trainer.one_step()
                group.barrier()
                seconds = time.perf_counter() - begin
                own_times.append(seconds / ((before + speed()) / 2))
    usual = speed.usual
    estimator = _estimator([_at_speed(made, usual / was) for was, made in profiles[1:]], steps)
    errors = []
    for split, own_times, peak in zip(splits, times, peaks, strict=True):
        estimate = rescore(estimator, estimator.estimate(split))
        errors.append(
            StepError(
                model=steps.name,
                ranks=group.size,
                split=str(split),
                predicted_s=estimate.seconds,
                measured_s=usual * statistics.median(own_times),
                predicted_bytes=estimate.memory.nbytes,
                measured_bytes=peak,
            )
        )
    return errors


def _estimator(profiles: list[Profile], steps: Steps) -> Estimator:
    profile = merged(profiles)
    assert profile.host is not None, "ranks measured together"
    return Estimator(MeasuredModel(profile), MeasuredMachines(profile.host), Training(steps.batch))


def _at_speed(profile: Profile, factor: float) -> Profile:
    """Return a profile with the times of layers multiplied by `factor`."""

    def scaled(cost: PerRows) -> PerRows:
        return PerRows(factor * cost.constant, factor * cost.per_row)

    def scaled_layers(profiled: Any) -> Any:
        return tuple(
            msgspec.structs.replace(
                layer,
                forward_s=scaled(layer.forward_s),
                input_grad_s=scaled(layer.input_grad_s),
                weight_grad_s=scaled(layer.weight_grad_s),
            )
            for layer in profiled
        )

    shared = {n: scaled_layers(layers) for n, layers in profile.shared.items()}
    return msgspec.structs.replace(profile, layers=scaled_layers(profile.layers), shared=shared)


def main(plan: StepsPlan) -> list[StepError] | None:
    """Run one rank; rank 0 returns the errors."""
    torch.use_deterministic_algorithms(True)  # as braid train does
    group = context.init()
    corpus = standard_library()
    errors = [error for steps in plan.steps for error in measure(steps, group, corpus)]
    context.shutdown()
    return errors if group.rank == 0 else None
