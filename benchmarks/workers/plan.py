"""A rank of `plan`: a GPT in synchronous and asynchronous pipelines, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.workers.plan_plan import RULES, SYNCHRONOUS, Plan
from benchmarks.workers.ps_plan import Measured
from braid import context
from braid.comm import Group
from braid.parallel.pipeline import Pipeline
from braid.parallel.pipeline.asynchronous import AsynchronousPipeline
from braid.programs.schedule.pipeline import VersionRule
from braid.train.config import MODELS
from braid.train.gpt import GPT, mean_loss

__all__ = ["main"]

SGD = partial(torch.optim.SGD, lr=0.01)
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


def _synchronous(group: Group, layers: list[torch.nn.Module], size: int) -> Callable[[Pairs], None]:
    pipeline = Pipeline(layers, num_microbatches=size, group=group)
    optimizer = SGD(pipeline.parameters())

    def train(pairs: Pairs) -> None:
        for begin in range(0, len(pairs), size):
            inputs, targets = map(torch.cat, zip(*pairs[begin : begin + size], strict=True))
            pipeline.step(inputs, targets, loss=mean_loss)
            optimizer.step()
            optimizer.zero_grad()

    return train


def _asynchronous(
    group: Group, layers: list[torch.nn.Module], rule: VersionRule, every: int
) -> Callable[[Pairs], None]:
    pipeline = AsynchronousPipeline(layers, SGD, group=group, versions=rule, every=every)

    def train(pairs: Pairs) -> None:
        pipeline.train_on(pairs, loss=mean_loss)

    return train


def measure(plan: Plan, group: Group) -> list[Measured]:
    """Return the seconds of each pipeline for all micro-batches of a round."""
    figures = []
    for model in plan.models:
        name, _, rows = model.partition(":")

        def layers(name: str = name) -> list[torch.nn.Module]:
            return GPT(MODELS[name], plan.context, tied=False).layers()

        ways = {SYNCHRONOUS: _synchronous(group, layers(), plan.num_microbatches)}
        for rule in RULES:
            every = plan.num_microbatches if rule == "2bw" else 1
            ways[rule] = _asynchronous(group, layers(), rule, every)
        generator = torch.Generator().manual_seed(0)
        shape = (2, int(rows), plan.context)
        count = plan.num_microbatches * plan.batches
        pairs = [tuple(torch.randint(0, 256, shape, generator=generator)) for _ in range(count)]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(plan.rounds + 1):
            for way, train in ways.items():
                group.barrier()
                begin = time.perf_counter()
                train(pairs)
                group.barrier()
                if number:  # the first round is a warm-up
                    seconds[way].append(time.perf_counter() - begin)
        figures.append(Measured(name=model, amount=count * int(rows), seconds=seconds))
    return figures


def main(plan: Plan) -> list[Measured] | None:
    """Run one rank; rank 0 returns the figures."""
    group = context.init()
    figures = measure(plan, group)
    context.shutdown()
    return figures if group.rank == 0 else None
