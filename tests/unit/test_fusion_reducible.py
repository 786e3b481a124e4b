"""The coordinator refuses exactly what groups refuse."""

from __future__ import annotations

import pytest
import torch

from braid.comm.tensors.reduction import check_op
from braid.errors import ConfigError
from braid.fusion.reducible import ORDERED, refusal

DTYPES = sorted(
    {
        str(value).removeprefix("torch.")
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
    }
)


@pytest.mark.parametrize("op", ORDERED)
def test_what_is_refused_is_what_groups_refuse(op):
    for dtype in DTYPES:
        try:
            check_op(op, getattr(torch, dtype))
            refused = False
        except ConfigError:
            refused = True
        assert bool(refusal(op, dtype)) is refused, dtype


def test_reductions_of_others_are_theirs_to_judge():
    assert refusal("adasum", "int64") == ""
