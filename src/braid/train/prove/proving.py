"""Take the same steps on N ranks and in one process, and compare them after each.

The ranks train in parallel. The first rank also runs the shares of all ranks in turn in one process
with the same number of threads (`data_parallel.accumulate`). After each step it compares the
parameters bit by bit. So the proof names the first step, and the first parameter in the order of
the module, at which the two runs differ, and by how much. Parameters that differ among ranks are
reported in the same way. `shares` checks that the shares make up the whole batch, because both runs
would compute the same wrong result. Both runs apply the loss weights that shares set.

Memory: two models and their optimizers' state on the first rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from braid.comm import Group
from braid.errors import MismatchError, below, raise_all
from braid.parallel.data_parallel import accumulate
from braid.parallel.gradients import ParamRecord, ParamTable
from braid.parallel.gradients.hashing import compare_values
from braid.parallel.sharding import sharding_of
from braid.train.prove.compare import Difference, difference, difference_of_ranks
from braid.train.prove.shares import (
    CHECKED_STEPS,
    ShareCheck,
    ShareGap,
    check_shares,
    noting_weights,
)
from braid.train.prove.task import Task

__all__ = ["Proof", "prove"]


class Proof(NamedTuple):
    """Result of a comparison between a parallel run and one process.

    Attributes:
        ranks: World size.
        steps: Number of compared steps, including the differing one.
        num_params: Number of parameters.
        numel: Number of elements of all parameters.
        step: First step (from 1) after which a parameter differs; 0 if all are equal.
        difference: Difference of the first such parameter of the module.
        others: Names of further parameters that differ after this step.
        losses: Losses of the first rank's share (parallel run, one process), by step, as text.
        gap: First step in which the mean loss of the shares is not the loss of the whole batch;
            None if there is none.
        is_split: Whether any share is not the whole batch.
    """

    ranks: int
    steps: int
    num_params: int
    numel: int
    step: int = 0
    difference: Difference | None = None
    others: tuple[str, ...] = ()
    losses: tuple[tuple[str, str], ...] = ()
    gap: ShareGap | None = None
    is_split: bool = True

    @property
    def holds(self) -> bool:
        """Whether both runs were equal after every step, and the shares make up the batch."""
        return self.difference is None and self.gap is None


def prove(group: Group, task: Task, steps: int) -> Proof | None:
    """Train in parallel and in one process, and compare after each step; a collective.

    Args:
        group: Group of all ranks.
        task: Model, loss and optimizer to train.
        steps: Number of steps.

    Returns:
        The proof on the first rank, None on the others.

    Raises:
        ConfigError: `steps` is less than 1.
    """
    raise_all(below(1, steps=steps))
    model = task.model()
    wrapped = task.wrap(model, group)
    optimizer = task.optimizer(model.parameters())
    with _whole(model):
        alone = _Alone(task, group.size, model) if group.rank == 0 else None
        table = ParamTable.of(model)
        numel = sum(record.param.numel() for record in table)
    losses: list[tuple[str, str]] = []
    differ: list[Difference] = []
    checks: list[ShareCheck] = []
    step = 0
    while step < steps and not differ:
        optimizer.zero_grad()
        loss = _seeded(task, wrapped, group.rank, group.size, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        with _whole(model):
            drifted = _drifted(group, ParamTable.of(model).records, step)
            if alone is not None:
                if step <= CHECKED_STEPS:
                    checks.append(check_shares(task, alone.model, group.size, step - 1))
                expected = alone.step(step - 1)
                losses.append((f"{loss.item():.9g}", f"{expected:.9g}"))
                differ = drifted or alone.compare(model)
        stop = torch.tensor([len(differ)], device="cpu")
        group.broadcast(stop, 0)
        if stop.item():
            break
    if alone is None:
        return None
    first = differ[0] if differ else None
    return Proof(
        group.size,
        step,
        len(table),
        numel,
        step if differ else 0,
        first,
        tuple(one.parameter for one in differ[1:]),
        tuple(losses),
        next((check.gap for check in checks if check.gap is not None), None),
        not all(check.are_whole for check in checks),
    )


class _Alone:
    """The run in one process, which starts with the same parameters as the ranks.

    Attributes:
        model: Model of this run.
    """

    def __init__(self, task: Task, size: int, begin: nn.Module) -> None:
        self._task = task
        self._size = size
        self.model = task.model()
        self.model.load_state_dict(begin.state_dict())
        self._optimizer = task.optimizer(self.model.parameters())
        self._weights: list[float | None] = [None] * size  # loss weight of each share
        self._weight: float | None = None  # loss weight of the current share
        for param in self.model.parameters():
            if (
                param.requires_grad
            ):  # same order of operations as `DistributedDataParallel`, for equal bits
                param.register_hook(self._weighted)  # type: ignore[no-untyped-call]

    def step(self, number: int) -> float:
        """Take one step; return the loss of the first share."""
        shares = [lambda rank=rank: self._loss(rank, number) for rank in range(self._size)]
        losses = accumulate(self.model, shares)
        total = sum(1.0 if weight is None else weight for weight in self._weights)
        if total > 0 and total != self._size:
            for param in self.model.parameters():
                if param.grad is not None:
                    param.grad.mul_(1.0 / (total / self._size))
        self._optimizer.step()
        return losses[0].item()

    def _loss(self, rank: int, number: int) -> torch.Tensor:
        def note(weight: float | None) -> None:
            self._weights[rank] = None if weight is None else float(weight)

        with noting_weights(self.model, note):
            loss = _seeded(self._task, self.model, rank, self._size, number)
        self._weight = self._weights[rank]
        return loss

    def _weighted(self, grad: torch.Tensor) -> torch.Tensor | None:
        return None if self._weight is None else grad * self._weight

    def compare(self, model: nn.Module) -> list[Difference]:
        """Return the parameters that differ, in the order of the module."""
        pairs = zip(model.named_parameters(), self.model.parameters(), strict=True)
        differences = (difference(name, param, expected) for (name, param), expected in pairs)
        return [one for one in differences if one is not None]


def _whole(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager in which the model's parameters are unsharded."""
    sharding = sharding_of(model)
    return nullcontext() if sharding is None else sharding.gathered()


def _drifted(group: Group, records: Sequence[ParamRecord], step: int) -> list[Difference]:
    """Return the parameters that differ among ranks, in the order of the module; a collective.

    Cost: a checksum of each parameter; where checksums differ, an all_gather of all parameters.
    """
    try:
        compare_values(group, records, f"after step {step}")
    except MismatchError:
        differences = []
        for record in records:
            flat = record.param.detach().contiguous()
            rows = group.all_gather(flat.view(1, -1))
            shaped = [row.view(record.param.shape) for row in rows]
            differences.append(difference_of_ranks(record.name, shaped, group.ranks))
        return [one for one in differences if one is not None]
    return []


def _seeded(task: Task, model: nn.Module, rank: int, size: int, step: int) -> torch.Tensor:
    torch.manual_seed(1_000_003 * step + rank)
    return task.loss(model, rank, size, step)
