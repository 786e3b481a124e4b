"""Operations that wait for a GPU, whose events are imitated by a clock."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from braid.comm import Group, StepsBy
from braid.comm.api.batch import Batch
from braid.comm.tensors import copies
from braid.comm.tensors.copies import Copies
from braid.errors import CommError, CommTimeout
from braid.runtime.transport import DeviceWait
from support.claims import possible
from support.group_conformance import GROUP_CLAIMS

pytestmark = pytest.mark.procs


class Event:
    """An event that a GPU passes after some seconds, or never because a kernel fails then."""

    def __init__(self, seconds: float, fails: bool) -> None:
        self._end = time.monotonic() + seconds
        self._fails = fails

    def query(self) -> bool:
        is_over = time.monotonic() > self._end
        if is_over and self._fails:
            msg = "CUDA error: device-side assert triggered"
            raise RuntimeError(msg)
        return is_over


class LateCopies(Copies):
    """Copies whose load takes some seconds on a GPU."""

    def __init__(self, seconds: float, fails: bool) -> None:
        super().__init__(frozenset({"cpu"}))
        self._waits = {torch.device("cuda", 0): DeviceWait(Event(seconds, fails), "cuda:0")}

    @property
    def needed(self) -> bool:
        return True

    def around(self, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
        yield from copies._ends_of(self._waits)
        yield from steps


def _sum(
    group: Group, seconds: float, steps_by: StepsBy, timeout_s: float, fails: bool = False
) -> Any:
    """Sum ranks, where the tensor of rank 1 comes after some seconds."""
    with Batch(group, lambda _: []) as batch:
        batch.all_reduce(torch.ones(3))
    (c,) = batch.collectives
    is_late = group.rank == 1
    c.copies = LateCopies(seconds if is_late else 0.0, fails and is_late)
    c.timeout_s = timeout_s
    group._describer.describe(c)
    work = group.engine.start(c, steps_by)
    early = work.done()
    try:
        work.wait()
    except RuntimeError as error:
        return type(error), str(error)
    return early, c.outs[0].tolist()


@pytest.mark.parametrize("steps_by", list(StepsBy))
def test_no_step_is_taken_before_the_gpu_has_copied(procs, steps_by):
    first, second = procs(2, _sum, 0.5, steps_by, 60.0)
    assert first[1] == second[1] == [2.0, 2.0, 2.0]
    assert not second[0]


def test_a_kernel_that_never_ends_is_named_on_all_ranks(procs):
    for kind, text in procs(2, _sum, math.inf, StepsBy.WAITER, 1.0):
        assert kind is CommTimeout
        assert "rank 1" in text


@pytest.mark.parametrize("steps_by", list(StepsBy))
def test_an_error_of_a_gpu_ends_the_operation_on_all_ranks(procs, steps_by):
    first, second = procs(2, _sum, 0.3, steps_by, 60.0, True)
    assert second == (RuntimeError, "CUDA error: device-side assert triggered")
    assert first[0] is CommError
    assert "rank 1" in first[1]
    assert "device-side assert" in first[1]


class Polled:
    """An event that a GPU passes after some looks."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def query(self) -> bool:
        self._looks -= 1
        return self._looks < 0


def _keep_elsewhere(group: Group, claim: Callable[[Group], None]) -> None:
    """Keep a claim with tensors that are all copied as from a GPU, and arrive late."""
    device, rng = torch.device("cuda", 0), random.Random(group.rank)
    check = copies._check

    def start_copy(target: torch.Tensor, source: torch.Tensor, _device: object) -> DeviceWait:
        target.copy_(source)
        return DeviceWait(Polled(rng.randrange(4)), device)

    def copy(self: Copies, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        self._devices.add(device)
        return partial(start_copy, target, source, device)

    imitated = mock.patch.multiple(
        copies,
        _check=lambda x, _types: check(x, frozenset({"cpu"})),
        _is_plain=lambda _x: False,
        _follow_current_stream=lambda _device: None,
        _start_copy=start_copy,
    )
    with imitated, mock.patch.object(Copies, "_copy", copy):
        for one in possible([claim], group.engine.capabilities):
            one(group)


# tensors that are not contiguous are copied here, and not refused
CLAIMS = [claim for claim in GROUP_CLAIMS if claim.__name__ != "bad_arguments_are_refused"]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.__name__)
def test_claim_holds_for_tensors_that_are_copied_from_a_gpu(procs, claim, size):
    procs(size, _keep_elsewhere, claim)
