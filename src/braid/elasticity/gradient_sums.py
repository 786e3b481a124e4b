"""Sums the gradients of a step's micro-batches in their order, on any number of ranks.

Problem: floating-point sums depend on the order of their terms. If the ranks that are left share
the micro-batches of a lost one, and each adds up its own first, the weights differ from the
weights of the undisturbed run.

Idea: a step has a fixed number of micro-batches, and ranks take them in turn, in rounds. After each
round the ranks' gradients are added in the order of ranks. Rank 0 begins the next round with the
sum so far, and not with zero:

    micro-batch    0    1    2    3    4         3 ranks, 5 micro-batches
    round 0       r0   r1   r2                   ((g0 + g1) + g2) = s
    round 1                      r0   r1         (((s + g3) + g4) + -0.0)

So the terms are added in the order of micro-batches, whatever the number of ranks; also on one. A
rank without a micro-batch adds -0.0, which changes no number. The sum is multiplied by 1 /
micro-batches once, at the end. If micro-batches have different numbers of samples, as in the last
step of a pass, each gradient is first multiplied by its samples over their mean. Gradients of 16
bits are added in float32, and rounded at the end.

Cost: one all-reduce of the gradients per round.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from zlib import crc32

import torch

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.gradients import FlatBuffer, ParamRecord
from braid.parallel.gradients.same_batches import sketch_of
from braid.runtime.tensor_buffers import checksum
from braid.runtime.transport import adoptable

__all__ = ["GradientSums", "memory_for", "num_rounds", "shard_of", "warn_of_idle_ranks"]

LOG = logging.getLogger(__name__)
BUCKET_BYTES = 25 << 20
NEUTRAL = -0.0  # x + -0.0 has the bits of x, also for x = -0.0


def num_rounds(num_shards: int, num_ranks: int) -> int:
    """Return the number of rounds of a step that has `num_shards` micro-batches.

    In a round, each rank computes at most one micro-batch.

    >>> num_rounds(5, 3), num_rounds(3, 3)
    (2, 1)
    """
    return -(-num_shards // num_ranks)


def shard_of(number: int, rank: int, num_ranks: int, num_shards: int) -> int | None:
    """Return the micro-batch of a rank in round `number`; None if it has none.

    >>> [shard_of(1, rank, 3, 5) for rank in range(3)]
    [3, 4, None]
    """
    shard = number * num_ranks + rank
    return shard if shard < num_shards else None


def warn_of_idle_ranks(group: Group, num_shards: int, *, compares: bool) -> None:
    """Warn, on rank 0 of all, if there are more replicas than micro-batches in a step, or only one.

    Args:
        group: The replicas.
        num_shards: Number of micro-batches of a step.
        compares: Whether replicas are compared, by `verify` or `replace_slow`.
    """
    if group.ranks[group.rank]:
        return
    if group.size > num_shards:
        LOG.warning(
            "braid: %d replicas share %d micro-batches, so the work of %d does not count%s: pass "
            "shards=%d or more, or start fewer ranks",
            *(group.size, num_shards, group.size - num_shards),
            *(", and verify= checks no step" * compares, group.size),
        )
    if group.size == 1 and compares:
        LOG.warning(
            "braid: there is one replica, so verify= and replace_slow= compare nothing until other "
            "ranks join: use more ranks, or a mesh with dp=2 or more"
        )


class GradientSums:
    """Sums the gradients of a step's micro-batches over ranks; see the module.

    Args:
        group: Ranks that train together.
        records: Parameters of the model, the same on all ranks.
        buffers: Result of `memory_for`, which several groups may use in turn; new
            memory when None.
    """

    def __init__(
        self,
        group: Group,
        records: Sequence[ParamRecord],
        buffers: list[FlatBuffer] | None = None,
    ) -> None:
        self._group = group
        buffers = memory_for(records) if buffers is None else buffers
        for buffer in buffers:
            if buffer.tensor.device.type == "cpu":
                group.adopt(buffer.tensor)
        self._views = [view for buffer in buffers for view in buffer.views]
        trained = [record for record in records if record.spec.requires_grad]
        self._records = [record for part in _parts(trained) for record in part]
        self._requests = [group.persistent("all_reduce", b.tensor) for b in buffers]
        self._loss = torch.zeros(1, dtype=torch.float64)
        self._loss_request = group.persistent("all_reduce", self._loss)
        self._status = torch.zeros(len(self._records) + 1, dtype=torch.int64)
        self._is_present = torch.zeros_like(self._status)
        self._status_request = group.persistent("all_reduce", self._status, op="max")

    def add(self, number: int, *, has_shard: bool, loss: float = 0.0, weight: float = 1.0) -> None:
        """Add the gradients of this rank's micro-batch to the sums, and set `.grad` to None.

        Args:
            number: Number of the round.
            has_shard: Whether this rank has a micro-batch in this round.
            loss: Loss of the micro-batch.
            weight: Samples of the micro-batch, divided by the mean number of samples in the step.

        Raises:
            ConfigError: A gradient is sparse.
        """
        holds_sum = number > 0 and self._group.rank == 0
        present = []
        for record, view in zip(self._records, self._views, strict=True):
            grad = record.param.grad if has_shard else None
            present.append(grad is not None)
            if grad is None:
                if not holds_sum:
                    view.fill_(NEUTRAL)
                continue
            if grad.is_sparse:
                msg = (
                    f"the gradient of {record.name!r} is sparse, which braid.elastic does not "
                    "support: pass sparse=False to the embedding"
                )
                raise ConfigError(msg)
            if weight != 1.0:  # in the dtype of the sum, and before it: on all ranks alike
                grad = grad.to(view.dtype) * weight
            if holds_sum:
                view.add_(grad)
            else:
                view.copy_(grad)
            record.param.grad = None
        term = loss * weight if has_shard else NEUTRAL
        self._loss[0] = self._loss[0] + term if holds_sum else term
        self._status[:-1] = torch.tensor(present)

    def reduce(self, number: int, num_shards: int, *, flag: bool) -> bool:
        """Add up the ranks' gradients of a round; a collective.

        Args:
            number: Number of the round.
            num_shards: Number of micro-batches of the step.
            flag: Whether this rank raises a flag.

        Returns:
            Whether any rank has raised the flag.
        """
        is_last = number + 1 == num_rounds(num_shards, self._group.size)
        scale = 1.0 / num_shards if is_last else None
        self._status[-1] = flag
        works = [self._status_request.start(), self._loss_request.start(scale)]
        works += [request.start(scale) for request in self._requests]
        for work in works:
            work.wait()
        if not number:
            self._is_present.zero_()
        self._is_present |= self._status
        return bool(self._status[-1])

    @property
    def loss(self) -> float:
        """Mean of the losses of all samples, after the last round."""
        return self._loss.item()

    def checksum(self) -> int:
        """Return a checksum of the gradients that are in `.grad` now."""
        sums = [0 if r.param.grad is None else checksum(r.param.grad) for r in self._records]
        return crc32(repr(sums).encode())

    def sketch(self) -> tuple[float, float]:
        """Return two numbers of the gradients in `.grad`; see `sketch_of`."""
        return sketch_of(r.param.grad for r in self._records if r.param.grad is not None)

    def set_gradients(self) -> None:
        """Set `.grad` of each parameter to its mean, if it has a gradient in any micro-batch."""
        for record, view, present in zip(
            self._records, self._views, self._is_present.tolist()[:-1], strict=True
        ):
            record.param.grad = view.to(record.param.dtype) if present else None

    def clear(self) -> None:
        """Set `.grad` of all parameters to None."""
        for record in self._records:
            record.param.grad = None


def memory_for(records: Sequence[ParamRecord]) -> list[FlatBuffer]:
    """Allocate memory for the sums of the gradients of parameters."""
    parts = _parts([record for record in records if record.spec.requires_grad])
    return [_buffer([record.param for record in part]) for part in parts]


def _buffer(params: Sequence[torch.Tensor]) -> FlatBuffer:
    """Allocate memory for the sums of some gradients."""
    device, dtype = params[0].device, params[0].dtype
    if dtype in {torch.bfloat16, torch.float16}:
        dtype = torch.float32

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    shapes = [param.shape for param in params]
    is_on_cpu = device.type == "cpu"
    return FlatBuffer(shapes, dtype, adoptable if is_on_cpu else allocate, like=params)


def _parts(records: Sequence[ParamRecord]) -> list[list[ParamRecord]]:
    """Divide parameters into buckets of one device and dtype, the last ones first."""
    parts: dict[tuple[torch.device, torch.dtype], list[list[ParamRecord]]] = {}
    for record in reversed(records):
        of_kind = parts.setdefault((record.param.device, record.param.dtype), [[]])
        if sum(other.param.nbytes for other in of_kind[-1]) >= BUCKET_BYTES:
            of_kind.append([])
        of_kind[-1].append(record)
    return [part for of_kind in parts.values() for part in of_kind]
