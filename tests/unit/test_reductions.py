"""The table of reductions is that of torch, and every package that refuses a reduction refuses alike."""

from __future__ import annotations

import pytest
import torch

from braid.comm.tensors.reduction import OPS, combine
from braid.compat.horovod.fusion.coordinator import _impossible
from braid.compat.horovod.fusion.request import Request
from braid.programs.reductions import REDUCTIONS, refusal
from braid.types import dtype_name

DTYPES = sorted(
    {dtype_name(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
)


def test_every_reduction_of_the_table_is_carried_out():
    assert set(OPS) == set(REDUCTIONS)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_what_is_defined_can_be_computed(op):
    defined = [dtype for dtype in DTYPES if not refusal(op, dtype)]
    assert "int32" in defined
    for dtype in defined:
        ones = torch.ones(3, dtype=getattr(torch, dtype))
        combine([ones, ones], out := torch.empty_like(ones), op, None)
        assert out.dtype is ones.dtype


def test_the_coordinator_refuses_what_groups_refuse_and_leaves_others_alone():
    request = Request("x", "all_reduce", "int64", (3,), op="adasum")
    assert _impossible({0: request}, [0]) == ""
    refused = Request("x", "all_reduce", "float32", (3,), op="band")
    assert "'band' is not defined for float32" in _impossible({0: refused}, [0])
