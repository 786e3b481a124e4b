"""Adasum: a sum of gradients that corrects for their common direction.

Problem: with n ranks the sum of gradients takes a step n times as long as one gradient, the mean a
step of the same length. If gradients point the same way, the sum goes too far; if they are
orthogonal, the mean goes only 1/n as far as it could, and the learning rate must be tuned again for
each n.

Idea: subtract from each of two gradients half of its projection on the other:

    Adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b     equal: a     orthogonal: a + b

for each tensor separately, since layers differ; and for more than two by a tree of pairs. The tree
is recursive doubling: in round k rank r and rank r xor 2^k exchange all their data, and both
compute the same. Ranks beyond the largest power of two first send their data to another rank, and
receive the result in the end.

Cost: ceil(log2 n) (a + l b), and two more messages if n is not a power of two. (Halving vectors
would send 2 l in total, but needs a sum over more and more ranks for the dot products of every
round.)

The order of ranks matters, except for two ranks, for equal tensors, and for orthogonal ones.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, sections 3 and
4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from braid.comm import Group, StepsBy
from braid.errors import ConfigError
from braid.parallel.data_parallel.flat_params import FlatParams
from braid.parallel.gradients import GradBucket
from braid.parallel.gradients.flat import shaped
from braid.parallel.gradients.grad_bucket import Steps

__all__ = ["adasum", "adasum_hook"]

TAG = 0x616461  # "ada"


def adasum_hook(state: object, bucket: GradBucket) -> Steps:
    """Combine a bucket by Adasum (see `adasum`): `model.register_comm_hook(None, adasum_hook)`.

    The result has the size of one rank's gradient, so use the learning rate of one process. `state`
    is ignored.
    """
    del state
    return _rounds(bucket.group, bucket.buffer(), bucket.gradients())


def adasum(tensors: Sequence[torch.Tensor], group: Group) -> None:
    """Replace each floating or complex tensor by its Adasum over all ranks; a collective.

    Adasum is the sum of orthogonal tensors, and the mean of equal ones. Use it for gradients, or
    for the changes of an optimizer's step, as in the paper for optimizers with momentum.

    Args:
        tensors: Tensors of the same shapes on all ranks.
        group: Ranks that take part.

    Raises:
        ConfigError: A tensor is neither floating nor complex.
    """
    wrong = [str(x.dtype) for x in tensors if not (x.is_floating_point() or x.is_complex())]
    if wrong:
        msg = (
            f"adasum takes floating or complex tensors, got {', '.join(wrong)}: leave them out, or "
            "cast them"
        )
        raise ConfigError(msg)
    copies = FlatParams(tensors, group)
    for flat, parts in zip(copies.read(), copies.views(), strict=True):
        for work in _rounds(group, flat, parts):
            work.wait()
    copies.write()


@torch.no_grad()
def combine_adasum(a: torch.Tensor, b: torch.Tensor) -> None:
    """Replace `a` by Adasum(a, b); dot products are computed in 64 bits.

    >>> a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    >>> combine_adasum(a, b); a
    tensor([3., 4.])
    >>> combine_adasum(a, a.clone()); a
    tensor([3., 4.])
    """
    if a.is_complex():  # as real vectors of twice the length
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    x, y = a.reshape(-1).double(), b.reshape(-1).double()
    common, of_a, of_b = (x @ y).item(), (x @ x).item(), (y @ y).item()
    part_a = 1.0 - common / (2.0 * of_a) if of_a else 1.0
    part_b = 1.0 - common / (2.0 * of_b) if of_b else 1.0
    if a.dtype in {torch.float32, torch.float64}:
        a.mul_(part_a).add_(b, alpha=part_b)
    else:
        a.copy_(a.float().mul_(part_a).add_(b.float(), alpha=part_b))


def _rounds(group: Group, flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> Steps:
    """Exchange `flat` and write the result to it; `parts` are views of `flat`."""
    rank, size = group.rank, group.size
    power = 1 << (size.bit_length() - 1)
    other = torch.empty_like(flat)
    pieces = torch.split(other, [part.numel() for part in parts])
    theirs = [shaped(piece, part) for piece, part in zip(pieces, parts, strict=True)]

    def exchange(peer: int, *, sends: bool, into: torch.Tensor | None) -> Steps:
        with group.coalesce(steps_by=StepsBy.WAITER) as batch:
            if sends:
                batch.send(flat, peer, tag=TAG)
            if into is not None:
                batch.recv(into, peer, tag=TAG)
        yield batch.work

    if rank >= power:
        yield from exchange(rank - power, sends=True, into=None)
        yield from exchange(rank - power, sends=False, into=flat)
        return
    if rank + power < size:
        yield from exchange(rank + power, sends=False, into=other)
        for local_part, other_part in zip(parts, theirs, strict=True):
            combine_adasum(local_part, other_part)
    distance = 1
    while distance < power:
        peer = rank ^ distance
        yield from exchange(peer, sends=True, into=other)
        for local_part, other_part in zip(parts, theirs, strict=True):
            low, high = (local_part, other_part) if rank < peer else (other_part, local_part)
            combine_adasum(low, high)  # both ranks compute the same, bit by bit
        if rank > peer:
            flat.copy_(other)
        distance *= 2
    if rank + power < size:
        yield from exchange(rank + power, sends=True, into=None)
