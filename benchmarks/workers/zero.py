"""One rank of `zero`: training steps of one model by several engines, in turns.

    alone        no communication; all ranks compute at the same time
    fsdp2        torch's fully_shard over Gloo, each layer a unit
    fsdp2_braid  the same over the backend "braid"
    ddp          braid's DistributedDataParallel
    stage1..3    braid's sharding

Each engine has a separate copy of the model, with AdamW. In every round each takes one step, in
random order. Then braid's engines take steps in which bytes are counted.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from braid.cli.bench.harness.rounds import in_rounds, median_ratio
from braid.cli.bench.workers.ddp_models import Job, job_of
from braid.comm import Group
from braid.context import init, shutdown
from braid.parallel.data_parallel import DistributedDataParallel
from braid.parallel.sharding import Bytes, Sharding, ShardingOptions, attach, live_bytes

__all__ = ["MODEL_NAMES", "STAGES", "VARIANTS", "Case", "Live", "Measured", "Plan", "main"]

STAGES = ("stage1", "stage2", "stage3")
VARIANTS = ("alone", "fsdp2", "fsdp2_braid", "ddp", *STAGES)
MODEL_NAMES = ("gpt", "mlp", "tiny")
TINY = (4, 32, 8)  # layers, width and sequences
WARM_UP = 3
FLOAT32 = Bytes(4, 4, 0, 8)  # of a parameter, its gradient, and the two moments of Adam


class Case(msgspec.Struct, frozen=True):
    """One model with one batch.

    Attributes:
        model: Name out of `MODEL_NAMES`.
        batch: Number of samples or sequences per rank in a step.
    """

    model: str
    batch: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        cases: Models and batches.
        rounds: Largest number of steps of each engine.
        budget_s: Approximate seconds for a case.
    """

    cases: tuple[Case, ...]
    rounds: int
    budget_s: float


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one stage on one rank.

    Attributes:
        peak: Peak number of bytes of parameters, gradients, states and slots during steps.
        slots: Bytes of slots, which hold temporarily unsharded units.
        formula: Bytes by the formula of the stage, without slots.
        sent: Ratio of the bytes that a step sends to the bytes of the parameters.
    """

    peak: int
    slots: int
    formula: float
    sent: float


class Measured(msgspec.Struct, kw_only=True):
    """Figures of one model.

    Attributes:
        case: Model and batch.
        num_params: Number of parameters.
        ranks: World size.
        step_s: Median seconds of a step on the slowest rank, by variant.
        speedup: Ratio of a step of FSDP2 over Gloo to the variant's, median of the rounds.
        live: Bytes by stage.
        rounds_s: Seconds of every step, by variant.
    """

    case: Case
    num_params: int
    ranks: int
    step_s: dict[str, float]
    speedup: dict[str, float]
    live: dict[str, Live]
    rounds_s: dict[str, list[float]]


class _Step:
    """Training steps of one engine."""

    def __init__(self, model: nn.Module, job: Job, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.job = job
        self.optimizer = optimizer

    def __call__(self) -> None:
        loss = self.job.loss(self.model(self.job.inputs))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def main(plan: Plan) -> list[Measured] | None:
    """Measure everything; rank 0 returns the figures."""
    group = init()
    dist.init_process_group("gloo")
    over_braid = dist.new_group(backend="braid")
    assert over_braid is not None
    measured = [_measure(group, over_braid, case, plan) for case in plan.cases]
    dist.destroy_process_group()
    shutdown()
    return measured if group.rank == 0 else None


def _measure(group: Group, over_braid: dist.ProcessGroup, case: Case, plan: Plan) -> Measured:
    job = _job(case, group.rank)
    base = job.model
    world = dist.group.WORLD
    assert world is not None
    steps: dict[str, _Step] = {}
    alone = copy.deepcopy(base)
    steps["alone"] = _Step(alone, job, _adamw(alone))
    for name, process_group in (("fsdp2", world), ("fsdp2_braid", over_braid)):
        model = _fsdp2(copy.deepcopy(base), process_group)
        steps[name] = _Step(model, job, _adamw(model))
    wrapped = DistributedDataParallel(copy.deepcopy(base), process_group=group)
    steps["ddp"] = _Step(wrapped, job, _adamw(wrapped))
    engines = {}
    for number, name in enumerate(STAGES, 1):
        model = copy.deepcopy(base)
        optimizer = _adamw(model)
        options = ShardingOptions(stage=number, units=_units(model))
        engines[name] = Sharding(model, group, options)
        attach(engines[name], optimizer)
        steps[name] = _Step(model, job, optimizer)
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    times = in_rounds(group, steps, rounds=plan.rounds, budget_s=plan.budget_s)
    return Measured(
        case=case,
        num_params=sum(p.numel() for p in base.parameters()),
        ranks=group.size,
        step_s={variant: statistics.median(seconds) for variant, seconds in times.items()},
        speedup={
            variant: median_ratio(times["fsdp2"], seconds) for variant, seconds in times.items()
        },
        live={n: _live(group, steps[n], engine) for n, engine in engines.items()},
        rounds_s=times,
    )


def _job(case: Case, rank: int) -> Job:
    """Return a model of `braid bench ddp`, or a tiny one for which only the engines take time."""
    if case.model != "tiny":
        return job_of(case.model, case.batch, seed=rank)
    layers, width, rows = TINY
    x = torch.randn(case.batch * rows, width, generator=torch.Generator().manual_seed(rank))
    linears: list[nn.Module] = [nn.Linear(width, width, bias=False) for _ in range(layers)]
    return Job(nn.Sequential(*linears), x, lambda output: output.square().mean())


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a GPT, or the layers of a perceptron."""
    blocks: Any = getattr(model, "blocks", None)
    units = model.children() if blocks is None else blocks
    return [unit for unit in units if any(True for _ in unit.parameters())]


def _fsdp2(model: nn.Module, process_group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(process_group, "cpu")
    for unit in _units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _live(group: Group, step: _Step, engine: Sharding) -> Live:
    """Count bytes at each layer of a step."""
    peak = slots = 0

    def look(*_args: Any) -> None:
        nonlocal peak, slots
        held = live_bytes(engine, step.optimizer)
        peak, slots = max(peak, held.total), held.slots

    handles = [
        handle
        for unit in _units(engine.model)
        for handle in (
            unit.register_forward_hook(look),
            unit.register_full_backward_hook(look),
        )
    ]
    before = group.statistics()["nbytes"]
    step()
    sent = group.statistics()["nbytes"] - before
    look()
    for handle in handles:
        handle.remove()
    numel = sum(flat.numel for flat in engine.flats)
    formula = FLOAT32.live(engine.options.stage, group.size) * numel
    return Live(peak=peak, slots=slots, formula=formula, sent=sent / (4 * numel))
