"""Operations of one group take effect in the order in which they were called, whatever has to be copied for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from braid.comm import Group

N = 3
Second = Callable[[Group, torch.Tensor], object]


def _gathers(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_gather(x, async_op=True).result


def _reduces_elsewhere(group: Group, x: torch.Tensor) -> torch.Tensor:
    return group.all_reduce(x, "max", out=torch.empty(2, N), async_op=True).result


def _scatters_over_itself(group: Group, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(1, N)
    group.reduce_scatter(x, out=out, async_op=True)
    return out


def _exchanges_parts(group: Group, x: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty(N) for _ in range(2)]
    group.all_to_all([x[0], x[1]], out=out, async_op=True)
    return out


def _fuses(group: Group, x: torch.Tensor) -> list[torch.Tensor]:
    first, second = torch.empty(2, N), torch.empty(2, N)
    with group.coalesce() as batch:
        batch.all_reduce(x, "max", out=first)
        batch.all_reduce(x, "max", out=second)
    return [first, second]


SECOND = [_gathers, _reduces_elsewhere, _scatters_over_itself, _exchanges_parts, _fuses]


def _values(result: object) -> list[float]:
    parts = result if isinstance(result, list) else [result]
    return sorted({float(v) for part in parts for v in part.flatten()})


def _twice(group: Group, second: Second) -> list[float]:
    """All-reduce a tensor that is not contiguous and, before it has ended, use it once more."""
    x = torch.ones(N, 2).t()
    found = []
    for _ in range(3):
        x.fill_(1.0)
        group.all_reduce(x, async_op=True)
        result = second(group, x)
        group.barrier()  # takes effect after both
        found += _values(result)
    return sorted(set(found))


@pytest.mark.parametrize("second", SECOND)
def test_an_operation_sees_what_the_one_before_it_wrote(world, second):
    expected = [4.0] if second is _scatters_over_itself else [2.0]
    assert world(2, _twice, second) == [expected, expected]
