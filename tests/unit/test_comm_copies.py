"""Copies between a GPU and the CPU, and the fusion of tensors of several devices; the GPU is imitated."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch

from braid.comm.api.batch import fuse
from braid.comm.engines.collective import Collective
from braid.comm.tensors import copies

GPU = torch.device("cuda", 7)


class Target:
    """Page-locked memory that keeps what is copied to it."""

    source = torch.empty(0)

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self.source = source


def test_numbers_are_conjugated_and_negated_before_they_are_copied():
    z = torch.tensor([1 + 2j])
    imitated = {"stream": lambda _: contextlib.nullcontext(), "Event": mock.Mock()}
    for x in (z.conj(), z.conj().imag):
        target: Any = Target()
        with (
            mock.patch.multiple(torch.cuda, **imitated),
            mock.patch.object(copies, "_copy_stream"),
        ):
            copies._start_copy(target, x, GPU)
        assert not target.source.is_conj()
        assert not target.source.is_neg()
        assert torch.equal(target.source, x)


def test_threads_that_copy_first_at_the_same_time_use_one_stream():
    both = threading.Barrier(2)

    def slow_stream(device: torch.device) -> object:
        time.sleep(0.02)  # threads switch here
        return object()

    def first_use() -> object:
        both.wait()
        return copies._copy_stream(GPU)

    copies._new_copy_stream.cache_clear()
    with mock.patch.object(torch.cuda, "Stream", slow_stream), ThreadPoolExecutor(2) as pool:
        one, other = [pool.submit(first_use) for _ in range(2)]
        assert one.result() is other.result()
    copies._new_copy_stream.cache_clear()


def test_sums_on_different_devices_are_not_joined():
    def all_reduce(device: str) -> Collective:
        x = torch.ones(3, device=device)
        return Collective("all_reduce", (3,), x.dtype, ins=(x,), outs=(x,), nbytes=x.nbytes)

    kinds = [
        [c.outs[0].device.type for c in fuse([all_reduce("cpu"), all_reduce(other)])]
        for other in ("cpu", "meta")
    ]
    assert kinds == [["cpu"], ["cpu", "meta"]]
