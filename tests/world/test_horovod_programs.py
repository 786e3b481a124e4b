"""Habits of programs written for Horovod that its front must meet."""

from __future__ import annotations

import pytest
import torch
from horovod_jobs import horovod

import braid.compat.horovod.torch as hvd
from braid.comm import Group

# Gradients of alltoall.


def _rows(size: int, how: str) -> list[list[int]]:
    """Rows by sender, then receiver."""
    ranks = range(size)
    if how == "equal":
        return [[2] * size for _ in ranks]
    if how == "equal, more on later ranks":
        return [[rank + 1] * size for rank in ranks]
    return [[(rank + 2 * other) % 3 for other in ranks] for rank in ranks]


def _sent_back(group: Group, how: str) -> torch.Tensor:
    """The gradient of rows whose results are weighted with the number of their receiver."""
    with horovod(group):
        splits = _rows(group.size, how)[group.rank]
        x = torch.ones(sum(splits), 2, requires_grad=True)
        y = hvd.alltoall(x, None if how.startswith("equal") else torch.tensor(splits))
        y = y[0] if isinstance(y, tuple) else y
        (y * (group.rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad


@pytest.mark.parametrize("how", ["equal", "equal, more on later ranks", "any"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_of_alltoall_go_back_to_the_rows_that_were_sent(procs, size: int, how: str):
    for splits, grad in zip(_rows(size, how), procs(size, _sent_back, how), strict=True):
        weights = torch.arange(1.0, size + 1).repeat_interleave(torch.tensor(splits))
        assert torch.equal(grad, weights[:, None].expand(-1, 2))
