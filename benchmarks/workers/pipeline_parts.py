"""Further measurements of `pipeline`: live bytes, and steps over the number of micro-batches."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.workers.pipeline_models import Compute, Job, cut, job_of
from braid.comm import Group
from braid.comm.autograd import LiveTensors
from braid.parallel.pipeline import Pipeline
from braid.programs.schedule import Action, Costs, Program, simulate
from braid.programs.schedule.pipeline import SCHEDULES, most_held, stage_ranks, with_recompute
from braid.programs.schedule.program import RECEIVE
from braid.programs.schedule.simulate import Route

__all__ = ["Held", "Swept", "measure_held", "measure_sweep"]

MODEL = "compute"
NUM_MICROBATCHES = 8
WARM_UP = 2


class Held(msgspec.Struct, kw_only=True):
    """Live bytes of activations of one schedule.

    Attributes:
        schedule: Name of the schedule.
        recompute: Mode of recomputation.
        measured_bytes: Peak number of live bytes, by rank.
        formula_bytes: The schedule's number of micro-batches times the bytes of one, by rank.
        num_held: The schedule's number of micro-batches, by rank.
    """

    schedule: str
    recompute: str
    measured_bytes: list[int]
    formula_bytes: list[int]
    num_held: list[int]


class Swept(msgspec.Struct, kw_only=True):
    """A step of one batch that is divided into some number of micro-batches.

    Attributes:
        num_microbatches: Number of micro-batches.
        rows: Number of rows of a micro-batch.
        measured_s: Shortest seconds of a step, as for all times here: longer ones are due to other
            programs.
        simulated_s: Seconds of the simulated program, with separately measured costs.
        forward_s: Largest seconds of a forward of a stage.
        backward_s: Largest seconds of a backward of a stage.
        message_s: Seconds of a message from rank to rank.
    """

    num_microbatches: int
    rows: int
    measured_s: float
    simulated_s: float
    forward_s: float
    backward_s: float
    message_s: float


def measure_held(group: Group, schedule: str, recompute: str) -> Held:
    """Compare the bytes that ranks hold from forward to backward with the schedule's formula.

    The bytes are the tensors that autograd saves, and the inputs and outputs of layers, without the
    batch and parameters. With recomputation they are the inputs of all micro-batches in flight, and
    the activations of micro-batches that R has recomputed.
    """
    plain = SCHEDULES[schedule](group.size, NUM_MICROBATCHES)
    program = with_recompute(plain, recompute)
    job = job_of(MODEL, NUM_MICROBATCHES)
    homes, parts = stage_ranks(program), cut(job.blocks, program.header.num_units)
    local_stages = [stage for stage in sorted(homes) if homes[stage] == group.rank]
    inputs = [0 if stage == 0 else _rows(job).nbytes for stage in local_stages]
    one = [
        _peak(job, lambda stage=stage: _forward(job, parts, stage))  # type: ignore[misc]
        for stage in local_stages
    ]
    pipeline = Pipeline(
        job.blocks,
        num_microbatches=NUM_MICROBATCHES,
        schedule=schedule,
        group=group,
        recompute=recompute,
    )
    measured = _peak(job, job.step_of_braid(pipeline))
    num_held = most_held(program)
    again, waiting = num_held[group.rank], most_held(plain)[group.rank]
    formula = again * statistics.fmean(one)
    if program != plain:
        formula = again * statistics.fmean(
            a - b for a, b in zip(one, inputs, strict=True)
        ) + waiting * statistics.fmean(inputs)
    figures = group.all_gather(torch.tensor([[measured, round(formula)]]))
    measured_bytes, formula_bytes = figures.T.tolist()
    return Held(
        schedule=schedule,
        recompute=recompute,
        measured_bytes=measured_bytes,
        formula_bytes=formula_bytes,
        num_held=num_held,
    )


def _rows(job: Job) -> torch.Tensor:
    """Return the input of a micro-batch, which has the shape of every boundary."""
    return job.batch.chunk(NUM_MICROBATCHES)[0]


def _forward(job: Job, parts: Sequence[nn.Sequential], stage: int) -> torch.Tensor:
    x = _rows(job)
    if stage:
        x = x.clone().requires_grad_()
    y: torch.Tensor = parts[stage](x)
    if stage + 1 < len(parts):
        return y
    return nn.functional.mse_loss(y, job.target.chunk(NUM_MICROBATCHES)[0])


def _peak(job: Job, run: Callable[[], object]) -> int:
    """Return the peak number of live bytes of activations in `run`."""
    params = [p for block in job.blocks for p in block.parameters()]
    outside = {x.untyped_storage().data_ptr() for x in (job.batch, job.target, *params)}
    live = LiveTensors()

    def register(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in outside:
            live.register(x)
        return x

    def before(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        register(args[0])

    def after(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        register(output)

    with ExitStack() as stack:
        for block in job.blocks:
            stack.callback(block.register_forward_pre_hook(before).remove)
            stack.callback(block.register_forward_hook(after).remove)
        stack.enter_context(saved_tensors_hooks(register, lambda x: x))
        run()
    return live.peak_bytes


def measure_sweep(
    group: Group, model: str, schedule: str, numbers: Sequence[int], rounds: int
) -> list[Swept]:
    """Time steps of one batch over numbers of micro-batches, and simulate them.

    Args:
        group: Group of all ranks.
        model: Name of the model.
        schedule: Name of the schedule.
        numbers: Numbers of micro-batches, which must divide the batch.
        rounds: Number of steps with each number, in turns.
    """
    rows = len(job_of(model, max(numbers)).batch)
    jobs = {m: job_of(model, m, rows=rows) for m in numbers}
    computes: dict[int, Compute] = {}
    steps: dict[tuple[int, str], Callable[[], object]] = {}
    for m, job in jobs.items():
        program = SCHEDULES[schedule](group.size, m)
        computes[m] = Compute(program, group.rank, job.copy())
        steps[m, "compute"] = computes[m]
        steps[m, "braid"] = job.step_of_braid(job.by_braid(group, schedule, m))
        steps[m, "messages"] = _Messages(group, job.batch[: rows // m])
    times: dict[tuple[int, str], list[float]] = {name: [] for name in steps}
    shuffler, names = random.Random(0), list(steps)
    for number in range(WARM_UP + rounds):
        shuffler.shuffle(names)
        for name in names:
            group.barrier()
            start = time.perf_counter()
            steps[name]()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return [
        _swept(group, SCHEDULES[schedule](group.size, m), rows, computes[m], times) for m in numbers
    ]


class _Messages:
    """Sends a tensor from the first rank to the second one and back, several times."""

    COUNT = 8

    def __init__(self, group: Group, x: torch.Tensor) -> None:
        self._group, self._x = group, x.clone()

    def __call__(self) -> None:
        """Send the tensor there and back."""
        rank, group = self._group.rank, self._group
        for _ in range(self.COUNT):
            for source, target in ((0, 1), (1, 0)):
                if rank == source:
                    group.send(self._x, target)
                elif rank == target:
                    group.recv(self._x, source)


class _Bus:
    """A network without latency; the cost of a message is work of its receiver."""

    bytes_per_s = ()
    burst_bytes = ()

    def route(self, _source: int, _target: int, _nbytes: float) -> Route:
        """Return a route that takes no time."""
        return Route(0.0, ())


def _swept(
    group: Group,
    program: Program,
    rows: int,
    compute: Compute,
    times: dict[tuple[int, str], list[float]],
) -> Swept:
    m = program.header.num_indices
    local_costs = torch.zeros(program.header.num_units, 2, dtype=torch.float64)
    for (kind, stage), seconds in compute.seconds.items():
        steps = [seconds[i : i + m] for i in range(WARM_UP * m, len(seconds), m)]
        local_costs[stage, int(kind == "B")] = min(map(statistics.fmean, steps))
    costs = group.all_reduce(local_costs).tolist()
    mine = torch.tensor([min(times[m, "braid"]), min(times[m, "messages"])], dtype=torch.float64)
    measured_s, messages_s = group.all_reduce(mine, "max").tolist()
    message_s: float = messages_s / (2 * _Messages.COUNT)

    def seconds_of(_rank: int, action: Action) -> float:
        if program.vocabulary.role(action) == RECEIVE:
            return message_s
        cost: float = costs[action.unit][int(action.kind == "B")]
        return cost

    timeline = simulate(program, Costs(lambda *_: 0.0, seconds_of), _Bus(), buffered=True)
    return Swept(
        num_microbatches=m,
        rows=rows // m,
        measured_s=measured_s,
        simulated_s=timeline.seconds,
        forward_s=max(forward for forward, _ in costs),
        backward_s=max(backward for _, backward in costs),
        message_s=message_s,
    )
