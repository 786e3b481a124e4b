"""Ranks that time steps of a strategy against steps of a wrapper with the same replicas."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec
import torch
from torch import nn

import braid
from braid.cli.bench.harness.rounds import median_ratio
from braid.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, Strategy
from braid.train.config import MODELS
from braid.train.gpt import GPT

__all__ = ["StepPlan", "Steps", "mirrored", "workers"]

CONTEXT = 64
WARM_UP = 3


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the training.

    Attributes:
        model: Name of a GPT of `braid train`.
        batch: Number of rows in a step, over all replicas.
        replicas: Number of replicas.
        rounds: Number of steps of each, in turns.
    """

    model: str = "mini"
    batch: int = 16
    replicas: int = 2
    rounds: int = 30


class Steps(msgspec.Struct, frozen=True):
    """Median seconds of a step.

    Attributes:
        strategy: Seconds with the strategy.
        wrapper: Seconds with the wrapper.
        ratio: Ratio of the strategy's seconds to the wrapper's, median of the rounds.
    """

    strategy: float
    wrapper: float
    ratio: float


def mirrored(plan: StepPlan) -> Steps:
    """Compare MirroredStrategy with DataParallel."""
    devices = ["cpu"] * plan.replicas
    tokens = torch.randint(0, 256, (plan.batch, CONTEXT))

    def wrapped(model: nn.Module) -> Callable[[], torch.Tensor]:
        parallel = braid.DataParallel(model, devices)
        return lambda: parallel(tokens, tokens).mean()

    return _in_turns(plan, MirroredStrategy(devices), tokens, wrapped)


def workers(plan: StepPlan) -> Steps | None:
    """Compare MultiWorkerMirroredStrategy with DistributedDataParallel; rank 0 returns figures."""
    group = braid.init()
    generator = torch.Generator().manual_seed(group.rank)
    share = torch.randint(0, 256, (plan.batch // group.size, CONTEXT), generator=generator)

    def wrapped(model: nn.Module) -> Callable[[], torch.Tensor]:
        parallel = braid.DistributedDataParallel(model, process_group=group)
        return lambda: parallel(share, share)

    strategy = MultiWorkerMirroredStrategy(device="cpu", group=group)
    steps = _in_turns(plan, strategy, share, wrapped)
    return steps if group.rank == 0 else None


def _in_turns(
    plan: StepPlan,
    strategy: Strategy,
    tokens: torch.Tensor,
    wrapped: Callable[[nn.Module], Callable[[], torch.Tensor]],
) -> Steps:
    size, clock = MODELS[plan.model], braid.init().context.clock
    with strategy.scope():
        model = GPT(size, CONTEXT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    other = GPT(size, CONTEXT)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    loss_of = wrapped(other)
    cut = strategy.experimental_distribute_dataset([tokens])
    batch = next(iter(cut)) if len(strategy.devices) > 1 else tokens

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x, x)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def wrapped_step() -> None:
        other_optimizer.zero_grad()
        loss_of().backward()  # type: ignore[no-untyped-call]
        other_optimizer.step()

    calls: list[Callable[[], object]] = [lambda: strategy.run(step, args=(batch,)), wrapped_step]
    times: list[list[float]] = [[], []]
    pairs = list(zip(calls, times, strict=True))
    for number in range(plan.rounds + WARM_UP):
        # alternate the order: the second call waits for ranks that the first one delayed
        for call, seconds in pairs if number % 2 else pairs[::-1]:
            begin_ns = clock.now_ns()
            call()
            seconds.append((clock.now_ns() - begin_ns) / 1e9)
    ours, theirs = (seconds[WARM_UP:] for seconds in times)
    return Steps(statistics.median(ours), statistics.median(theirs), median_ratio(ours, theirs))
