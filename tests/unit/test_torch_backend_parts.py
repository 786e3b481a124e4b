"""The parts of the torch backend that need no ranks."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

import braid_torch_backend
from braid.comm.engines.background_poller import BackgroundPoller
from braid.comm.torch_backend.futures import WorkFuture
from braid.comm.torch_backend.shapes import Reduction, cut, divided, reduction, rows
from braid.errors import CommError, ConfigError


def raises() -> None:
    msg = "stopped"
    raise CommError(msg)


@pytest.mark.parametrize("name", ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"])
def test_reductions_are_recognised_wrapped_and_bare(name: str) -> None:
    kind = getattr(dist.ReduceOp, name.upper())
    assert reduction(kind) == reduction(dist.ReduceOp(kind)) == Reduction(name)


def test_scaled_sum_carries_its_factor() -> None:
    assert reduction(_make_nccl_premul_sum(0.25)) == Reduction("sum", 0.25)


def test_future_is_brought_about_by_whoever_waits_for_it() -> None:
    waits: list[int] = []
    future = WorkFuture(lambda: waits.append(1), [3])
    doubled = future.then(lambda f: f.value()[0] * 2)
    assert (doubled.wait(), future.wait(), waits) == (6, [3], [1])


def test_callback_may_wait_for_another_future() -> None:
    inner = WorkFuture(lambda: None, 5)
    outer = WorkFuture(lambda: None, 1).then(
        lambda f: f.value() + inner.then(lambda g: g.value()).wait()
    )
    assert outer.wait() == 6


def test_error_reaches_every_future_that_follows() -> None:
    future = WorkFuture(raises, None)
    after = future.then(lambda f: f.value())
    with pytest.raises(CommError, match="stopped"):
        after.wait()
    assert isinstance(future.error, CommError)


class Countdown:
    """Done after so many looks."""

    def __init__(self, looks: int) -> None:
        self.asked = threading.Event()
        self.looks = looks

    def wait(self, timeout_s: float | None = None) -> None:
        assert timeout_s is None

    def done(self) -> bool:
        self.looks -= 1
        self.asked.set()
        return self.looks <= 0

    def exception(self) -> None:
        return None


def test_background_poller_takes_steps_and_settles_futures() -> None:
    poller = BackgroundPoller("braid-torch_backend-test")
    finished = threading.Event()
    future = WorkFuture(lambda: None, 7)
    future.add_done_callback(lambda _f: finished.set())
    poller.when_done(Countdown(3), future.finish)
    assert finished.wait(10)
    poller.close()
    assert future.value() == 7


def test_background_poller_comes_again_for_what_it_can_leave_for_longer() -> None:
    poller, work = BackgroundPoller("braid-torch_backend-test"), Countdown(1)
    poller.poll(work, rarely=True)
    assert work.asked.wait(10)
    poller.close()


def test_background_poller_does_not_ask_what_it_has_released() -> None:
    poller, released, other = (
        BackgroundPoller("braid-torch_backend-test"),
        Countdown(1),
        Countdown(1),
    )
    poller.poll(released, rarely=True)
    poller.release(released)
    poller.poll(other, rarely=True)
    assert other.asked.wait(10)
    poller.close()
    assert not released.asked.is_set()


def test_results_are_flat_if_they_can_be_and_rows_otherwise() -> None:
    part = torch.empty(2, 3)
    flat, stacked = (
        rows(torch.empty(2, 2, 3), part, 2),
        rows(torch.empty(2, 3, 2).transpose(1, 2), part, 2),
    )
    assert isinstance(flat, torch.Tensor)
    assert (flat.shape, [x.shape for x in stacked]) == ((12,), [(2, 3), (2, 3)])


def test_results_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 x 6 elements"):
        rows(torch.empty(5), torch.empty(2, 3), 2)
    with pytest.raises(ConfigError, match="2 x 6 elements"):
        divided(torch.empty(5), torch.empty(2, 3), 2)


def test_pieces_have_the_lengths_that_were_given() -> None:
    assert [x.shape[0] for x in cut(torch.empty(5, 2), [1, 4], 2)] == [1, 4]


def test_autoload_cannot_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")
    braid_torch_backend.autoload()


@pytest.mark.proof
def test_importing_torch_does_not_import_braid() -> None:
    program = "import torch, sys; sys.exit(any(n.split('.')[0] == 'braid' for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
