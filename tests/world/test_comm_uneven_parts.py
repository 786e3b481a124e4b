"""Persistent requests take one tensor per member, of any sizes, where they are neighbours in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import said_by

from braid.comm import Group


def _both(group: Group, widths: list[int]) -> Any:
    full = group.empty((sum(widths),), torch.float32)
    rows = torch.split(full, widths)
    own = torch.empty(widths[group.rank])
    scatter = group.persistent("reduce_scatter", rows, out=own)
    gathered = torch.zeros(sum(widths))
    gather = group.persistent("all_gather", own, out=torch.split(gathered, widths))
    results = []
    for start in range(2):
        full.copy_(torch.arange(sum(widths)) + start + group.rank)
        scatter.start().wait()
        gather.start().wait()
        results.append(gathered.tolist())
    apart = [torch.zeros(width) for width in widths]
    said = said_by(lambda: group.persistent("reduce_scatter", apart, out=torch.zeros(own.shape)))
    return results, said


@pytest.mark.parametrize("widths", [[3, 0, 5], [0, 4, 0], [2, 2, 2], [0, 0, 100_000]])
def test_parts_of_any_size_are_registered_once(world, widths):
    total = torch.arange(sum(widths)) * 3.0 + 3
    expected = [total.tolist(), (total + 3).tolist()]
    for results, said in world(3, _both, widths):
        assert results == expected
        if sum(width > 0 for width in widths) > 1:
            assert "would have to be copied at every start" in said
