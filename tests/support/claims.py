"""Building blocks of claims about groups: computable inputs, a reference, a comparison of bits.

Each claim is a function that every rank calls with its group. It computes all ranks' inputs itself,
so it can compare its own result with a loop in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from braid.comm import Group
from braid.comm.engines.engine import Capabilities

__all__ = [
    "LARGE",
    "SIZES",
    "Claim",
    "needs",
    "of_rank",
    "possible",
    "reduced",
    "same",
    "ways",
]

Claim: TypeAlias = Callable[[Group], None]
NEEDS: dict[str, str] = {}  # claim -> the capability without which an engine cannot keep it

SIZES = (0, 1, 3, 1000, 9001, 70_001)  # below and above the staging chunk, not divisible
LARGE = 150_001  # float32: more than two chunks of the staging slots
WAYS = ("staged", "pulled")


def needs(capability: str) -> Callable[[Claim], Claim]:
    """Mark a claim that only engines with `capability` (a field of `Capabilities`) can keep."""

    def mark(claim: Claim) -> Claim:
        NEEDS[claim.__name__] = capability
        return claim

    return mark


def possible(claims: Sequence[Claim], capabilities: Capabilities) -> list[Claim]:
    """Select the claims that an engine with `capabilities` has to keep."""
    return [
        claim
        for claim in claims
        if claim.__name__ not in NEEDS or getattr(capabilities, NEEDS[claim.__name__])
    ]


def of_rank(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Make the input of `rank`, which any rank can compute."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 5, (numel,), generator=generator).to(dtype)


def reduced(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in one loop in the order of ranks, as the reference.

    16-bit floats are added in float32 when there are more than two.
    """
    short = inputs[0].dtype in (torch.bfloat16, torch.float16)
    wide = short and (len(inputs) > 2 or (op == "avg" and len(inputs) > 1))
    combine: dict[str, Callable[..., torch.Tensor]] = {
        "sum": torch.add,
        "avg": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
    }
    out = inputs[0].float() if wide else inputs[0].clone()
    for x in inputs[1:]:
        out = combine[op](out, x)
    if op == "avg":
        mode = None if out.dtype.is_floating_point else "trunc"
        out = torch.div(out, len(inputs), rounding_mode=mode)
    return out.to(inputs[0].dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless shape, dtype and every bit of the two tensors agree."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    bits = [x.clone(memory_format=torch.contiguous_format) for x in (actual, expected)]
    bits = [x.as_strided((x.numel(),), (1,)).view(torch.uint8) for x in bits]
    differs = bits[0] != bits[1]
    assert not differs.any(), f"{int(differs.sum())} bytes differ: {actual} != {expected}"


def ways(group: Group) -> list[str | None]:
    """List None for the engine's own choice, and every algorithm of the engine."""
    return [None, *(way for way in WAYS if way in group.engine.capabilities.algorithms)]
