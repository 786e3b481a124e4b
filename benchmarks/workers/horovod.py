"""One rank of `horovod`: small tensors, training steps and exchanges, in turns.

    small       200 tensors of 1 KiB: one all-reduce each through Gloo; by name, reduced together
    step        training of one model with braid's DistributedDataParallel, and Horovod's optimizer
    exchange    messages between ranks in steady state for 200 tensors; only the state machine

In every round each is run once, in random order, after a barrier. The slowest rank determines the
time.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import distributed as dist
from torch import nn

import braid.compat.horovod.torch as hvd
from braid.cli.bench.harness.rounds import in_rounds
from braid.cli.bench.workers.ddp import Case
from braid.cli.bench.workers.ddp_models import Job, job_of
from braid.comm import Group
from braid.compat.horovod.fusion import FusionState, Request
from braid.context import init, shutdown
from braid.parallel.data_parallel import DistributedDataParallel

__all__ = ["Exchange", "Plan", "Small", "Step", "main"]

NUM_SMALL, SMALL_NUMEL = 200, 256
LEARNING_RATE = 1e-4
WARM_UP = 5


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements to make.

    Attributes:
        cases: Models and batches, such as mlp:64; `tiny` is a model with a short step.
        rounds: Number of rounds of each measurement.
        budget_s: Approximate seconds for a case; at least 20 rounds are run.
    """

    cases: tuple[Case, ...]
    rounds: int
    budget_s: float


class Small(msgspec.Struct, kw_only=True):
    """Figures of many small tensors.

    Attributes:
        seconds: Median seconds for all tensors, by candidate.
        speedup: Speed-up of the engine over Gloo, median of the rounds.
        between: First and third quartile of the speed-up.
    """

    seconds: dict[str, float]
    speedup: float
    between: tuple[float, float]


class Step(msgspec.Struct, kw_only=True):
    """Figures of one model.

    Attributes:
        model: Name of the model.
        batch: Batch of a rank.
        seconds: Median seconds of a step, by candidate.
        longer: Relative extra time of a step over a step with braid's DDP, median of the rounds.
        between: First and third quartile of `longer`.
    """

    model: str
    batch: int
    seconds: dict[str, float]
    longer: float
    between: tuple[float, float]


class Exchange(msgspec.Struct, kw_only=True):
    """Figures of an exchange in steady state.

    Attributes:
        tensors: Number of tensors that become ready in the exchange.
        seconds: Median seconds of the slowest rank.
        state_s: Seconds of the state machine.
    """

    tensors: int
    seconds: float
    state_s: float


class Figures(msgspec.Struct, kw_only=True):
    """Figures of small tensors, steps and exchanges."""

    small: Small
    steps: list[Step]
    exchanges: list[Exchange]


def main(plan: Plan) -> Figures | None:
    """Measure everything; rank 0 returns the figures."""
    group = init()
    dist.init_process_group("gloo")
    hvd.init()
    figures = Figures(
        small=_small(group, plan.rounds),
        steps=[_step(group, case.model, case.batch, plan) for case in plan.cases],
        exchanges=[_exchange(group, count, plan.rounds) for count in (1, 25, 200)],
    )
    hvd.shutdown()
    dist.destroy_process_group()
    shutdown()
    return figures if group.rank == 0 else None


def _small(group: Group, rounds: int) -> Small:
    tensors = [torch.full((SMALL_NUMEL,), float(n + group.rank)) for n in range(NUM_SMALL)]

    def each_through_gloo() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)

    def all_under_way_in_gloo() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    def together() -> None:
        handles = [hvd.allreduce_async_(t, name=f"small.{n}") for n, t in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    ways = {"gloo": each_through_gloo, "gloo, async": all_under_way_in_gloo, "engine": together}
    times = in_rounds(group, _warmed_up(ways), rounds=rounds)
    ratios = [g / e for g, e in zip(times["gloo"], times["engine"], strict=True)]
    return Small(
        seconds={way: statistics.median(t) for way, t in times.items()},
        speedup=statistics.median(ratios),
        between=_quartiles(ratios),
    )


def _step(group: Group, model: str, batch: int, plan: Plan) -> Step:
    job = _tiny(batch, group.rank) if model == "tiny" else job_of(model, batch, seed=group.rank)
    inner, other = copy.deepcopy(job.model), job.model
    wrapped = DistributedDataParallel(inner, process_group=group)
    plain = torch.optim.SGD(inner.parameters(), lr=LEARNING_RATE)
    patched = hvd.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), lr=LEARNING_RATE),
        [(f"{model}{batch}.{name}", param) for name, param in other.named_parameters()],
    )

    def step_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            loss = job.loss(net(job.inputs))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    ways = {"ddp": step_of(wrapped, plain), "horovod": step_of(other, patched)}
    start = time.perf_counter()
    for way in ways.values():
        way()
    elapsed = group.all_reduce(torch.tensor([time.perf_counter() - start]), "max").item()
    rounds = min(plan.rounds, max(20, int(plan.budget_s / elapsed)))
    times = in_rounds(group, _warmed_up(ways), rounds=rounds)
    longer = [h / d - 1.0 for h, d in zip(times["horovod"], times["ddp"], strict=True)]
    return Step(
        model=model,
        batch=batch,
        seconds={way: statistics.median(t) for way, t in times.items()},
        longer=statistics.median(longer),
        between=_quartiles(longer),
    )


def _tiny(batch: int, rank: int) -> Job:
    """Return a model of twelve layers of width 256; a step takes some milliseconds."""
    numbers = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(12):
        layer = nn.Linear(256, 256)
        with torch.no_grad():
            layer.weight.normal_(0.0, 1 / 16, generator=numbers)
        layers += [layer, nn.ReLU()]
    generator = torch.Generator().manual_seed(rank)
    x, y = (torch.randn(batch, 256, generator=generator) for _ in range(2))
    return Job(nn.Sequential(*layers[:-1]), x, lambda output: nn.functional.mse_loss(output, y))


def _exchange(group: Group, count: int, rounds: int) -> Exchange:
    """Time the exchanges of the engine, without the operations that follow."""
    state = FusionState(group.rank, group.ranks)
    requests = [
        Request(f"x{n}", "all_reduce", "float32", (SMALL_NUMEL,), 4, "sum") for n in range(count)
    ]
    bits = torch.zeros(len(state.open(0.0)) // 8, dtype=torch.int64)
    exchange = group.persistent("all_reduce", bits, op="band")
    whole, pure = [], []
    for _ in range(20 * rounds):
        for request in requests:
            state.submit(request, 0.0)
        group.barrier()
        start = time.perf_counter()
        bits.copy_(torch.frombuffer(bytearray(state.open(0.0)), dtype=torch.int64))
        opened = time.perf_counter()
        exchange.start().wait()
        received = time.perf_counter()
        lists = state.combined(bits.numpy().tobytes())
        answer = None
        if lists:
            news = group.objects.gather(state.own_list(0.0))
            answer = group.objects.broadcast(None if news is None else state.answer(news, 0.0))
        outcome = state.conclude(answer)
        end = time.perf_counter()
        assert sum(len(batch.responses) for batch in outcome.batches) == count
        if not lists:
            whole.append(end - start)
            pure.append(end - received + opened - start)
    slowest = group.all_reduce(torch.tensor([whole, pure], dtype=torch.float64), "max").tolist()
    return Exchange(
        tensors=count, seconds=statistics.median(slowest[0]), state_s=statistics.median(slowest[1])
    )


def _warmed_up(ways: Mapping[str, Callable[[], None]]) -> Mapping[str, Callable[[], None]]:
    """Return the candidates after running each a few times."""
    for _ in range(WARM_UP):
        for way in ways.values():
            way()
    return ways


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high
