"""Norm of sharded gradients that is bitwise equal to the norm of the unsharded gradients.

Problem: a sum of floating-point numbers depends on its order, so the norm of a sharded gradient
differs in the last bits from the norm of the whole, and clipping carries the difference into every
weight.

Idea: a definition of the sum of squares that does not depend on the sharding. Squares of BLOCK
neighbors of a parameter, in float64, are added pairwise. Sums of blocks are then converted to
integers of a common scale, which are added without rounding, for any order of ranks and parameters:

    x ** 2     |16 elements|16 elements|...|    float64, added pairwise inside of a block
    blocks     b0          b1                   times a power of two, cut into limbs of 22 bits
    limbs      h0 + h1 + ...  m0 + m1 + ...     int64, exact for up to 2**40 blocks

Shards must begin at multiples of BLOCK elements of a parameter.

Source: J. Demmel, H. D. Nguyen, "Parallel Reproducible Summation", IEEE Trans. Computers, 2015, for
the idea to cut all summands along one grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError

__all__ = ["BLOCK", "clip_counted_", "clip_pieces_", "clip_whole_", "exact_norm"]

BLOCK = 16  # elements
LIMB_BITS = 22
NUM_LIMBS = 3
CHUNK = 1 << 16  # elements with squares that fit into the cache
GPU_CHUNK = 1 << 24  # limits the memory for squares; a GPU has no such cache


def exact_norm(
    pieces: Iterable[torch.Tensor], groups: Sequence[Group] = (), norm_type: float = 2.0
) -> torch.Tensor:
    """Return the norm of all ranks' shards, as if they were one vector.

    Args:
        pieces: Pieces that this rank owns. If each begins at a multiple of BLOCK elements of its
            parameter, the bits do not depend on the sharding.
        groups: Ranks over which parameters are sharded; several groups for several mesh axes.
        norm_type: p of the p-norm; may be infinite. The bits of norms other than 2 and infinity
            may depend on the sharding.

    Raises:
        ConfigError: `norm_type` is not positive.

    Cost: two all_reduces of at most 24 bytes per group; four passes over the pieces; memory for a
    float64 number per BLOCK elements, and for 2**16 more (2**24 on a GPU).
    """
    return _norm_and_flag(pieces, groups, norm_type)[0]


def _norm_and_flag(
    pieces: Iterable[torch.Tensor],
    groups: Sequence[Group],
    norm_type: float,
    *,
    flag: bool = False,
) -> tuple[torch.Tensor, bool]:
    """Return the norm, and whether any rank has raised a flag; see `exact_norm`."""
    if not norm_type > 0:
        msg = f"norm_type must be above 0, got {norm_type}"
        raise ConfigError(msg)
    nonempty = [piece for piece in pieces if piece.numel()]
    device = nonempty[0].device if nonempty else torch.device("cpu")
    if math.isinf(norm_type):
        tops = [piece.detach().abs().max().double().reshape(1) for piece in nonempty]
        largest, any_flag = _largest(tops, device, groups, flag=flag)
        return torch.tensor(largest, dtype=torch.float64, device=device), any_flag
    parts = [part for piece in nonempty for part in _chunks(piece)]
    most_elements = max((part.numel() for part in parts), default=0)
    wide = torch.empty(most_elements + -most_elements % BLOCK, dtype=torch.float64, device=device)
    num_blocks = [-(-part.numel() // BLOCK) for part in parts]
    blocks = torch.zeros(1 + sum(num_blocks), dtype=torch.float64, device=device)
    for part, sums in zip(parts, torch.split(blocks[1:], num_blocks), strict=True):
        _sum_blocks(part, norm_type, wide, sums)
    most, any_flag = _largest([blocks.max().reshape(1)], device, groups, flag=flag)
    if not math.isfinite(most) or not most:
        return torch.tensor(most, dtype=torch.float64, device=device), any_flag
    shift = LIMB_BITS - math.frexp(most)[1]
    limbs = torch.zeros(NUM_LIMBS, dtype=torch.int64, device=device)
    for chunk in _chunks(blocks):
        limbs += _limbs(chunk, shift)
    for group in groups:
        limbs = group.all_reduce(limbs)
    total = sum(int(n) << (LIMB_BITS * i) for i, n in enumerate(reversed(limbs.tolist())))
    bits = shift + (NUM_LIMBS - 1) * LIMB_BITS
    exact = math.ldexp(total, -bits)
    norm = math.sqrt(exact) if norm_type == 2.0 else exact ** (1.0 / norm_type)
    return torch.tensor(norm, dtype=torch.float64, device=device), any_flag


def clip_whole_(params: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients of unsharded parameters to at most `max_norm`; return the norm before.

    On a CPU the norm has the same bits as the norm of sharded gradients over ranks. On a GPU the
    order of the sum differs, because the same order would take thousands of kernels.
    """
    params = list(params)
    grads = [param.grad for param in params if param.grad is not None]
    if grads and grads[0].is_cuda:
        return nn.utils.clip_grad_norm_(params, max_norm).item()
    return clip_pieces_(grads, max_norm).item()


def clip_pieces_(
    pieces: Sequence[torch.Tensor],
    max_norm: float,
    groups: Sequence[Group] = (),
    *,
    copies: Sequence[torch.Tensor] = (),
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale shards of gradients so that the norm of all shards is at most `max_norm`.

    Args:
        pieces: Gradients that this rank adds to the norm.
        max_norm: Largest norm.
        groups: Ranks over which the norm is summed; several groups for several mesh axes.
        copies: Local gradients to scale only, since another rank adds them to the norm; for example
            of replicated parameters.
        norm_type: See `exact_norm`.
        error_if_nonfinite: Whether to raise if the norm is not finite.

    Returns:
        The norm before scaling; the same on all ranks. Its dtype is float64 if a gradient's is.

    Raises:
        ConfigError: The norm is not finite and `error_if_nonfinite` is set, or `max_norm` is
            negative.
    """
    if not max_norm >= 0:
        msg = f"max_norm must not be negative, got {max_norm}"
        raise ConfigError(msg)
    scaled = [*pieces, *copies]
    is_double = any(piece.dtype == torch.float64 for piece in scaled)
    norm, any_double = _norm_and_flag(pieces, groups, norm_type, flag=is_double)
    if not any_double:
        norm = norm.float()
    if error_if_nonfinite and not bool(norm.isfinite()):
        msg = (
            f"the norm of the gradients is {norm.item()}: find the first layer with NaN or "
            "infinite gradients"
        )
        raise ConfigError(msg)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for piece in scaled:
        piece.detach().mul_(factor.to(piece.device))
    return norm


def clip_counted_(
    grads: Iterable[tuple[torch.Tensor, bool]], max_norm: float, groups: Sequence[Group]
) -> torch.Tensor:
    """Scale gradients like `clip_pieces_`, given which of them this rank adds to the norm.

    Args:
        grads: Pairs of a local gradient, and whether this rank adds it to the norm.
        max_norm: Largest norm.
        groups: Ranks over which the norm is summed.
    """
    pairs = list(grads)
    return clip_pieces_(
        [grad for grad, counts in pairs if counts],
        max_norm,
        groups,
        copies=[grad for grad, counts in pairs if not counts],
    )


def _largest(
    values: Sequence[torch.Tensor], device: torch.device, groups: Sequence[Group], *, flag: bool
) -> tuple[float, bool]:
    """Return the largest value of all ranks, NaN if one is NaN; and whether any has the flag."""
    most = torch.tensor([0.0, flag], dtype=torch.float64, device=device)
    if values:
        most[0] = torch.maximum(most[0], torch.cat([*values]).max())
    for group in groups:
        most = group.all_reduce(most, op="max")
    largest, any_flag = most.tolist()
    return largest, bool(any_flag)


def _chunks(piece: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = piece.detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat.reshape(-1)
    return torch.split(flat, GPU_CHUNK if flat.is_cuda else CHUNK)


def _sum_blocks(x: torch.Tensor, norm_type: float, wide: torch.Tensor, sums: torch.Tensor) -> None:
    """Write the sum of powers of each block into `sums`; `wide` is memory for the powers."""
    wide = wide[: x.numel() + -x.numel() % BLOCK]
    wide[: x.numel()].copy_(x)
    wide[x.numel() :].zero_()
    if norm_type == 2.0:
        wide.mul_(wide)
    else:
        wide.abs_().pow_(norm_type)
    rows = wide.view(-1, BLOCK)
    half = BLOCK // 2
    while half > 1:
        rows[:, :half].add_(rows[:, half : 2 * half])
        half //= 2
    torch.add(rows[:, 0], rows[:, 1], out=sums)


def _limbs(blocks: torch.Tensor, shift: int) -> torch.Tensor:
    """Return the sums of the blocks' limbs, highest limb first."""
    half = shift // 2  # 2.0**shift may overflow
    rest = blocks * math.ldexp(1.0, half) * math.ldexp(1.0, shift - half)
    sums = []
    for _ in range(NUM_LIMBS):
        limb = rest.floor()
        sums.append(limb.sum(dtype=torch.float64).to(torch.int64))
        rest.sub_(limb).mul_(1 << LIMB_BITS)
    return torch.stack(sums)
