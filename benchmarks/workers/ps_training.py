"""A training step with a parameter server, against the same step with all-reduce.

    rank 0   scheduler          ranks 2, 3   workers, which also form a group for the all-reduce
    rank 1   server

Each engine has a separate copy of the model. In every round each takes one step, in random order.
Scheduler and server sleep during the workers' all-reduce.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.workers.ps_plan import Measured, Plan
from braid import ps
from braid.cli.bench.harness.rounds import in_rounds
from braid.cli.bench.workers.ddp_models import Job, job_of
from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel

__all__ = ["ALL_REDUCE", "SERVERS", "WORKERS", "train"]

ALL_REDUCE, SERVERS, WORKERS = "all-reduce", "servers step", "workers step"
MAKE = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
WARM_UP = 2
NUM_SERVERS = 1
TINY = (2, 32, 8)  # layers, width and samples


def train(group: Group, plan: Plan) -> list[Measured] | None:
    """Measure steps; the first worker returns the figures."""
    job = _job(plan, group.rank)
    workers = group.split(int(group.rank > NUM_SERVERS))
    assert workers is not None, "every rank has passed a color"
    with ps.join(group, NUM_SERVERS) as node:
        models = {SERVERS: copy.deepcopy(job.model), WORKERS: copy.deepcopy(job.model)}
        served = {
            SERVERS: ps.ParameterServer(models[SERVERS], node, MAKE, name="servers"),
            WORKERS: ps.ParameterServer(
                models[WORKERS], node, MAKE, where="workers", name="workers"
            ),
        }
        if not node.is_worker:
            node.serve()
            return None
        wrapped = DistributedDataParallel(copy.deepcopy(job.model), process_group=workers)
        optimizer = MAKE(wrapped.parameters())
        steps: dict[str, Callable[[], None]] = {
            ALL_REDUCE: partial(_step, wrapped, job, optimizer),
            **{name: partial(_step, model, job, model) for name, model in served.items()},
        }
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        seconds = in_rounds(workers, steps, rounds=plan.rounds)
    numel = sum(p.numel() for p in job.model.parameters())
    note = f"{numel / 1e6:.1f} M parameters, {plan.samples} samples a worker"
    figures = [Measured(name="step", amount=1, seconds=seconds, note=note)]
    return figures if workers.rank == 0 else None


def _step(model: nn.Module, job: Job, stepper: torch.optim.Optimizer | ps.ParameterServer) -> None:
    loss = job.loss(model(job.inputs))
    loss.backward()  # type: ignore[no-untyped-call]
    stepper.step()
    if isinstance(stepper, torch.optim.Optimizer):
        stepper.zero_grad()


def _job(plan: Plan, rank: int) -> Job:
    """Return a model of `braid bench ddp`, or a tiny one for which only messages take time."""
    if plan.model != "tiny":
        return job_of(plan.model, plan.samples, seed=rank)
    layers, width, samples = TINY
    inputs = torch.randn(samples, width, generator=torch.Generator().manual_seed(rank))
    linears = [nn.Linear(width, width, device="meta").to_empty(device="cpu") for _ in range(layers)]
    model = nn.Sequential(*linears)
    for param in model.parameters():
        nn.init.constant_(param, 0.01)
    return Job(model, inputs, lambda output: output.square().mean())
