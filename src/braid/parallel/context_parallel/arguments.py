"""Checks of queries, keys and values before anything is sent."""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.errors import ConfigError, MismatchError

__all__ = ["as_autocast", "check_attention", "shapes_differ"]


def check_attention(
    group: Group, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, halves: bool
) -> None:
    """Raise ConfigError, with all problems, if shapes or dtypes of q, k and v are invalid.

    Args:
        group: Ranks that share the sequences.
        q: Queries.
        k: Keys.
        v: Values.
        halves: Whether a rank's positions consist of an early and a late chunk, so that their
            number must be even.
    """
    if not isinstance(group, Group):
        msg = (  # type: ignore[unreachable]
            f"the first argument must be a braid.Group, got {type(group).__name__}: pass "
            'braid.mesh("cp=2")["cp"]'
        )
        raise ConfigError(msg)
    shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in (("q", q), ("k", k), ("v", v)))
    if not q.dim() == k.dim() == v.dim() == 4:
        msg = f"q, k and v must have the shape [batch, heads, positions, head width], got {shapes}"
        raise ConfigError(msg)
    problems = []
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not q.is_floating_point():
        dtypes = f"{q.dtype}, {k.dtype} and {v.dtype}"
        problems.append(f"q, k and v must have the same floating-point dtype, got {dtypes}")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        problems.append("q, k and v have different batch sizes")
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        problems.append(
            "numbers of positions differ: each rank has queries, keys and values of the same "
            "positions (a cache of keys, or attention to another sequence, is not supported)"
        )
    elif halves and group.size > 1 and q.shape[2] % 2:
        problems.append(
            f"{q.shape[2]} positions cannot be halved into an early and a late chunk: split the "
            "sequence with split_sequence, or pass balanced=False for contiguous pieces"
        )
    if q.shape[3] != k.shape[3]:
        problems.append("widths of queries and keys differ")
    if k.shape[1] != v.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        problems.append(
            f"{q.shape[1]} heads of queries must be a multiple of the heads of keys and values, "
            f"got {k.shape[1]} and {v.shape[1]}"
        )
    if problems:
        raise ConfigError(f"{'; '.join(problems)} ({shapes})")


def as_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors in the dtype that autocast uses for attention; unchanged without autocast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def shapes_differ(keys: torch.Tensor, values: torch.Tensor, error: MismatchError) -> MismatchError:
    """Return a MismatchError with the text of `error`, this rank's shapes and advice."""
    return MismatchError(
        "ranks that share sequences must have equal numbers of positions and heads, of one dtype; "
        f"this rank has keys {list(keys.shape)} and values {list(values.shape)}: split sequences "
        f"with split_sequence. {error}"
    )
