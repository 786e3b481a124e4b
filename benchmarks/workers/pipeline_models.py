"""The models of `pipeline`, and their steps: with braid, with torch, and without messages.

Blocks are residual: x + down(gelu(up(x))). The width determines the bytes between stages, the
hidden width the amount of computation.

    wide       4 MiB per micro-batch at a boundary, and little computation
    compute    256 KiB, and much computation
    tiny       16 bytes and hardly any computation: the step shows the engine's overhead
"""

from __future__ import annotations

import copy
import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn

from braid.comm import Group
from braid.parallel.pipeline import Pipeline
from braid.programs.schedule import Program
from braid.programs.schedule.pipeline import SCHEDULES, stage_ranks

__all__ = [
    "MODEL_NAMES",
    "NUM_BLOCKS",
    "TORCH_SCHEDULES",
    "Compute",
    "Job",
    "closed_form",
    "cut",
    "job_of",
]

Step = Callable[[], object]

TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}


class _Size(NamedTuple):
    """Size of a model, with the number of rows in a micro-batch."""

    width: int
    hidden: int
    rows: int


NUM_BLOCKS = 4  # two for each of 2 ranks, or one for each of 4 stages
SIZES = {
    "wide": _Size(4096, 32, 256),
    "compute": _Size(512, 2048, 128),
    "tiny": _Size(4, 4, 1),
}
MODEL_NAMES = tuple(SIZES)


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        with torch.no_grad():
            for linear in (self.up, self.down):
                linear.weight.normal_(0.0, width**-0.5 / 4, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + y


class Job(NamedTuple):
    """A model with a batch, the same on all ranks.

    Attributes:
        blocks: The model.
        batch: Its input.
        target: Targets of the loss.
    """

    blocks: list[nn.Module]
    batch: torch.Tensor
    target: torch.Tensor

    def copy(self) -> Job:
        """Return the same job with a copy of the parameters."""
        return self._replace(blocks=copy.deepcopy(self.blocks))

    def by_braid(self, group: Group, schedule: str, num_microbatches: int) -> Pipeline:
        """Return braid's pipeline of the model."""
        return Pipeline(
            self.blocks,
            num_microbatches=num_microbatches,
            schedule=schedule,
            group=group,
        )

    def step_of_braid(self, pipeline: Pipeline) -> Step:
        """Return a step of braid's pipeline."""
        return functools.partial(
            pipeline.step, self.batch, self.target, loss=nn.functional.mse_loss
        )

    def step_of_torch(
        self, process_group: dist.ProcessGroup | None, schedule: str, num_microbatches: int
    ) -> Step:
        """Return a step of torch's pipeline, with the same stages on the same ranks."""
        pipelining = importlib.import_module("torch.distributed.pipelining")  # warns
        schedules = importlib.import_module("torch.distributed.pipelining.schedules")
        rank, size = dist.get_rank(), dist.get_world_size()
        homes = stage_ranks(SCHEDULES[schedule](size, num_microbatches))
        local_stages = [stage for stage in sorted(homes) if homes[stage] == rank]
        parts = cut(self.blocks, len(homes))
        stages: list[Any] = [
            pipelining.PipelineStage(
                parts[stage], stage, len(homes), torch.device("cpu"), group=process_group
            )
            for stage in local_stages
        ]
        make = getattr(schedules, TORCH_SCHEDULES[schedule])
        single = len(homes) == size
        made = make(
            stages[0] if single else stages, num_microbatches, loss_fn=nn.functional.mse_loss
        )
        inputs = [self.batch] if 0 in local_stages else []
        targets = {"target": self.target} if len(homes) - 1 in local_stages else {}

        def step() -> None:
            made.step(*inputs, **targets)

        return step


class Compute:
    """Forwards and backwards of one rank's stages in the program's order, without messages.

    Args:
        program: Program of the pipeline.
        rank: The rank.
        job: Model and batch.

    Attributes:
        seconds: Seconds of each action so far, by kind and stage.
    """

    def __init__(self, program: Program, rank: int, job: Job) -> None:
        self._actions = [a for a in program.ranks[rank] if a.kind in {"F", "B"}]
        self._last = program.header.num_units - 1
        self._parts = cut(job.blocks, program.header.num_units)
        self._inputs = job.batch.chunk(program.header.num_indices)
        self._targets = job.target.chunk(program.header.num_indices)
        self._grad = torch.zeros_like(self._inputs[0])
        self.seconds: dict[tuple[str, int], list[float]] = defaultdict(list)

    def __call__(self) -> None:
        """Run the forwards and backwards of a step."""
        ends: dict[tuple[int, int], torch.Tensor] = {}
        for kind, stage, i, *_ in self._actions:
            start = time.perf_counter()
            if kind == "F":
                x = self._inputs[i].detach().requires_grad_(stage > 0)
                y = self._parts[stage](x)
                if stage == self._last:
                    y = nn.functional.mse_loss(y, self._targets[i])
                ends[stage, i] = y
            else:
                end = ends.pop((stage, i))
                end.backward(  # type: ignore[no-untyped-call]
                    None if stage == self._last else self._grad
                )
            self.seconds[kind, stage].append(time.perf_counter() - start)


def job_of(name: str, num_microbatches: int, *, rows: int = 0) -> Job:
    """Return a model and a batch.

    Args:
        name: Name out of `MODEL_NAMES`.
        num_microbatches: Number of micro-batches of the batch.
        rows: Number of rows of the whole batch; determined by the model's micro-batches when 0.
    """
    width, hidden, rows_each = SIZES[name]
    generator = torch.Generator().manual_seed(0)
    blocks: list[nn.Module] = [_Block(width, hidden, generator) for _ in range(NUM_BLOCKS)]
    shape = (rows or rows_each * num_microbatches, width)
    batch, target = (torch.randn(shape, generator=generator) for _ in range(2))
    return Job(blocks, batch, target)


def cut(blocks: Sequence[nn.Module], num_stages: int) -> list[nn.Sequential]:
    """Divide the blocks into stages with equal numbers of blocks."""
    size = len(blocks) // num_stages
    return [nn.Sequential(*blocks[i * size : (i + 1) * size]) for i in range(num_stages)]


def closed_form(program: Program) -> float:
    """Return the overhead (p - 1) / (v m) of GPipe, 1F1B and interleaved 1F1B."""
    ranks = program.num_ranks
    return (ranks - 1) / (program.header.num_units / ranks * program.header.num_indices)
