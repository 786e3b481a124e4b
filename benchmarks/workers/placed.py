"""Two ranks that time steps of a placed GPT against steps of a pipeline with one micro-batch."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable

import msgspec
import torch
from torch import nn

import braid
from braid import rpc
from braid.cli.bench.harness.rounds import median_ratio
from braid.strategies import placed
from braid.train.config import MODELS
from braid.train.gpt import GPT

__all__ = ["PlacedPlan", "PlacedSteps", "compare"]

WARM_UP = 5
BEGIN = threading.Event()  # set for the next step of the pipeline


class PlacedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the training.

    Attributes:
        model: Name of a GPT of `braid train`.
        batch: Number of rows in a step.
        context: Number of bytes in a row.
        rounds: Number of steps of each, in turns.
    """

    model: str = "tiny"
    batch: int = 16
    context: int = 128
    rounds: int = 30


class PlacedSteps(msgspec.Struct, frozen=True):
    """Seconds of steps.

    Attributes:
        placed: Median seconds of a step of the placed model.
        pipeline: Median seconds of a step of the pipeline.
        ratio: Ratio of the placed model's seconds to the pipeline's, median of the rounds.
        quickest_ratio: Ratio of the placed model's fastest step to the pipeline's.
        is_equal: Whether both have bitwise equal losses in all steps.
    """

    placed: float
    pipeline: float
    ratio: float
    quickest_ratio: float
    is_equal: bool


def make_gpt(model: str, batch: int, context: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a GPT and a batch."""
    tokens = torch.randint(0, 256, (batch, context), generator=torch.Generator().manual_seed(1))
    return GPT(MODELS[model], context, tied=False), tokens


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def begin() -> None:
    """Begin a step of the pipeline on this rank."""
    BEGIN.set()


def compare(plan: PlacedPlan) -> PlacedSteps | None:
    """Time both in turns; rank 0 returns figures."""
    group = braid.init()
    rpc.init_rpc(
        f"worker:{group.rank}",
        rpc_backend_options=rpc.RpcOptions(allowed_modules=["benchmarks"]),
    )
    model, tokens = make_gpt(plan.model, plan.batch, plan.context)
    graph = braid.capture(model, tokens)
    pipeline = braid.Pipeline(graph, num_microbatches=1, group=group)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)

    def pipeline_step() -> torch.Tensor:
        loss = pipeline.step((tokens,), tokens, loss=loss_of)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    try:
        if group.rank:
            for _ in range(plan.rounds + WARM_UP):
                BEGIN.wait()  # a rank that polls for the next step would disturb the other steps
                BEGIN.clear()
                pipeline_step()
            return None
        return _measured(plan, pipeline, pipeline_step)
    finally:
        rpc.shutdown()


def _measured(
    plan: PlacedPlan,
    pipeline: braid.Pipeline,
    pipeline_step: Callable[[], torch.Tensor],
) -> PlacedSteps:
    clock = pipeline.group.context.clock
    _, tokens = make_gpt(plan.model, plan.batch, plan.context)
    sizes = (plan.model, plan.batch, plan.context)
    # the same division as the pipeline's, from its parameters
    first = {name.split(".")[1] for name, _ in pipeline.named_parameters() if "blocks." in name}
    devices = {"token*": "/task:0", "position*": "/task:0", "norm*": "/task:1"}
    for index in range(MODELS[plan.model].layers):
        devices[f"blocks.{index}"] = "/task:0" if str(index) in first else "/task:1"
    with placed.place(make_gpt, args=sizes, devices=devices) as model:
        model.optimizer(torch.optim.SGD, lr=0.1)

        def beside() -> torch.Tensor:
            rpc.rpc_sync("worker:1", begin)
            return pipeline_step()

        calls: list[Callable[[], torch.Tensor]] = [
            lambda: model.step(tokens, tokens, loss=loss_of),
            beside,
        ]
        times: list[list[float]] = [[], []]
        losses: list[list[float]] = [[], []]
        for _ in range(plan.rounds + WARM_UP):
            for call, seconds, values in zip(calls, times, losses, strict=True):
                begin_ns = clock.now_ns()
                loss = call()
                seconds.append((clock.now_ns() - begin_ns) / 1e9)
                values.append(loss.item())
    ours, theirs = (seconds[WARM_UP:] for seconds in times)
    placed_s, pipeline_s = map(statistics.median, (ours, theirs))
    ratio = median_ratio(ours, theirs)
    quickest = min(ours) / min(theirs)
    return PlacedSteps(placed_s, pipeline_s, ratio, quickest, losses[0] == losses[1])
