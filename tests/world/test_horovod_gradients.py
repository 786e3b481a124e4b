"""What scripts do to gradients and parameters between backward and step, with Horovod's optimizer for torch."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from training import said_by

import braid.compat.horovod.torch as hvd
from braid.comm import Group
from braid.compat.horovod import session
from braid.compat.horovod.environment import HorovodEnvironment

LARGE = 600  # a square of these is sent while backward goes on, smaller ones when step() waits


@contextlib.contextmanager
def horovod(group: Group) -> Iterator[None]:
    session.start(group, HorovodEnvironment(cycle_time_ms=1000.0))  # until somebody waits
    try:
        yield
    finally:
        hvd.shutdown()


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def summing(params: list[nn.Parameter], prefix: str = "", **options: Any) -> Any:
    named = [(f"{prefix}{number}", param) for number, param in enumerate(params)]
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), named, op=hvd.Sum, **options)


def backward(params: list[nn.Parameter], times: float = 1.0) -> None:
    """The gradient of parameter k is k + 1, times the rank + 1."""
    factor = times * (hvd.rank() + 1)
    sum((param * (factor * (k + 1))).sum() for k, param in enumerate(params)).backward()  # type: ignore[union-attr]


def values(params: list[nn.Parameter]) -> list[list[float]]:
    return [param.grad.unique().tolist() for param in params]  # type: ignore[union-attr]


def said(call: Callable[[], object]) -> str:
    return said_by(call, (AssertionError, RuntimeError))


# Several optimizers.


def _twins(group: Group) -> list[list[list[float]]]:
    found = []
    with horovod(group):
        params = [zeros(LARGE, LARGE) for _ in range(4)]
        first, second = summing(params[:2], "first."), summing(params[2:], "second.")
        for _ in range(2):
            backward(params)
            first.step()
            second.step()
            found.append(values(params))
            first.zero_grad()
            second.zero_grad()
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_two_optimizers_of_like_models_do_not_mix_their_gradients(procs, size):
    expected = [[size * (size + 1) / 2 * (k + 1)] for k in range(4)]
    assert procs(size, _twins) == [[expected, expected]] * size


def _sessions(group: Group) -> list[list[list[float]]]:
    found, params = [], [zeros(LARGE, LARGE) for _ in range(4)]
    optimizers: list[Any] = []
    for _ in range(2):
        with horovod(group):
            optimizers.append(summing(params[len(optimizers) * 2 :][:2], f"{len(optimizers)}."))
            used = params[: 2 * len(optimizers)]
            backward(used)
            for optimizer in optimizers:
                optimizer.step()
            found.append(values(used))
            for optimizer in optimizers:
                optimizer.zero_grad()
    return found


def test_an_optimizer_goes_on_in_another_session_beside_new_ones(procs):
    assert procs(2, _sessions) == [[[[3.0], [6.0]], [[3.0], [6.0], [9.0], [12.0]]]] * 2


# Gradients.


def _layouts(group: Group) -> bool:
    with horovod(group):
        layout = torch.channels_last if hvd.rank() else torch.contiguous_format
        param = nn.Parameter(zeros(2, 3, 4, 5).to(memory_format=layout).detach())
        weight = torch.arange(120.0).view(2, 3, 4, 5)
        optimizer = summing([param])
        (param * weight).sum().backward()
        optimizer.synchronize()
        return torch.equal(param.grad, 2 * weight)


def test_ranks_may_lay_out_a_parameter_differently(procs):
    assert procs(2, _layouts) == [True, True]


def _kept(group: Group) -> list[list[list[float]]]:
    with horovod(group):
        params = [zeros(4), zeros(5)]
        optimizer = summing(params)
        backward(params)
        optimizer.synchronize()
        before = [param.grad for param in params]
        optimizer.zero_grad()
        backward(params, 10.0)
        optimizer.synchronize()
        return [[grad.unique().tolist() for grad in before], values(params)]  # type: ignore[union-attr]


def test_gradients_that_somebody_holds_stay_as_they_are(procs):
    assert procs(2, _kept) == [[[[3.0], [6.0]], [[30.0], [60.0]]]] * 2


def _replaced(group: Group) -> list[list[list[float]]]:
    found = []
    with horovod(group):
        params = [zeros(64), zeros(64)]
        optimizer = summing(params)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            backward(params)
            for param in params:
                param.grad = torch.from_numpy(
                    param.grad.numpy()
                )  # the same memory, once it is home
            optimizer.step()
            found.append(values(params))
    return found


def test_gradients_may_be_replaced_by_others_in_the_same_memory(procs):
    assert procs(2, _replaced) == [[[[3.0], [6.0]]] * 2] * 2


def _graphs(group: Group) -> list[bool]:
    with horovod(group):
        param, weight = zeros(LARGE, LARGE), torch.ones(LARGE, LARGE)
        saved = weakref.ref(weight)
        optimizer = summing([param])
        with pytest.warns(UserWarning, match="create_graph"):
            (param * weight).exp().sum().backward(create_graph=True)
        del weight
        optimizer.step()
        right = torch.equal(param.grad, torch.full_like(param, 2.0))
        optimizer.zero_grad()
        gc.collect()
        return [right, saved() is None]


def test_graphs_of_gradients_are_dropped_with_them(procs):
    assert procs(2, _graphs) == [[True, True]] * 2


def _none(group: Group) -> list[str]:
    found = []
    with horovod(group):
        for shape in ((3,), (LARGE, LARGE)):
            params = [zeros(*shape)]
            optimizer = summing(params, str(shape))
            backward(params)
            params[0].grad = None  # as a model's zero_grad() does
            found.append(said(optimizer.step).partition(",")[0])
    return found


def test_gradients_that_are_gone_before_the_step_are_said_to_be(procs):
    message = "AssertionError: zero_grad() was called between backward and step"
    assert procs(2, _none) == [[message, message]] * 2


def _late(group: Group) -> list[list[float]]:
    with horovod(group):
        params = [zeros(4), zeros(4)]
        optimizer = summing(params, groups=[params])
        backward(params[:1])
        zero = said(optimizer.zero_grad).partition(":")[0]
        params[1].requires_grad_(False)
        optimizer.synchronize()
        return [zero, *values(params[:1])]


def test_a_group_of_which_the_rest_is_frozen_after_backward_is_reduced(procs):
    assert procs(2, _late) == [["AssertionError", [3.0]]] * 2


# Parameters.


class AsTheyAre(hvd.Compression.none):  # type: ignore[misc,name-defined]
    """A compression that changes nothing, and of which nobody knows that."""


def _converted(group: Group, who: int) -> str:
    with horovod(group):
        net = nn.Linear(3, 3)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters(), compression=AsTheyAre
        )
        for step in range(2):
            if step and hvd.rank() <= who:
                net.double()
            optimizer.zero_grad()
            net(torch.ones(1, 3, dtype=net.weight.dtype)).sum().backward()
            said_ = said(optimizer.step)
        return said_


def test_parameters_that_change_their_dtype_are_reduced_in_it_or_refused(procs):
    assert procs(2, _converted, 1) == ["nothing happened"] * 2
    for found in procs(2, _converted, 0):
        assert found.startswith("HorovodInternalError: ranks disagree on the dtype of 'gradient.")
        assert "float64 on rank 0; float32 on rank 1" in found


def _reshaped(group: Group) -> list[list[float]]:
    with horovod(group):
        params = [zeros(5)]
        optimizer = summing(params)
        backward(params)
        optimizer.step()
        optimizer.zero_grad()
        params[0].data = torch.zeros(7)
        backward(params)
        optimizer.step()
        return [list(params[0].shape), *values(params)]


def test_a_parameter_may_get_another_shape(procs):
    assert procs(2, _reshaped) == [[[7], [3.0]]] * 2


# Ranks and threads.


def _joined(group: Group) -> list[list[list[float]]]:
    with horovod(group):
        params = [zeros(LARGE, LARGE) for _ in range(3)]
        optimizer = summing(params)
        backward(params[1:2] if hvd.rank() == 0 else params)
        if hvd.rank():
            optimizer.synchronize()
        hvd.join()
        return values(params[1:2] if hvd.rank() == 0 else params)


def test_what_a_rank_has_sent_before_it_joins_counts(procs):
    assert procs(3, _joined) == [[[11.0]], [[5.0], [11.0], [15.0]], [[5.0], [11.0], [15.0]]]


def _crossed(group: Group) -> list[Any]:
    """Rank 0 waits for the mean of the losses before the step, the others behind it."""
    with horovod(group):
        pair = hvd.add_process_set([0, 1])
        params, found = [zeros(3)], []
        optimizer = summing(params)
        for losses in (hvd.global_process_set, pair):
            backward(params)
            if hvd.rank():
                optimizer.step()
            if losses.included():
                hvd.allreduce(torch.ones(1), name="loss", process_set=losses)
            if not hvd.rank():
                optimizer.step()
            found.append(values(params))
            optimizer.zero_grad()
        return found


def test_gradients_travel_while_a_rank_waits_for_something_else(procs):
    assert procs(3, _crossed, timeout_s=20.0) == [[[[6.0]], [[6.0]]]] * 3


def _scheduled(group: Group, differ: bool) -> list[str]:
    """Rank 2 reduces the rate after the second step, and has no batch for the last one."""
    with horovod(group), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = [zeros(3)]
        optimizer = summing(params)
        for step in range(13):
            if step == 12 and hvd.rank() == 2:
                break
            backward(params)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and (hvd.rank() == 2 or not differ):
                optimizer.param_groups[0]["lr"] = 0.5
        hvd.join()
        return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("differ", [False, True])
def test_a_rate_that_differs_between_ranks_is_named_once(procs, differ):
    found = procs(3, _scheduled, differ)
    assert [len(texts) for texts in found] == [int(differ)] * 3
    for rank, texts in enumerate(found):
        rate = 0.5 if rank == 2 else 1.0
        assert all(f"rank {rank} of the process set has {{'lr': {rate}," in t for t in texts)


def _after_the_end(group: Group) -> list[list[float]]:
    """The last gradients are reduced in the backward, and other ranks end before the step."""
    with horovod(group):
        params = [zeros(LARGE, LARGE)]
        optimizer = summing(params)
        backward(params)
        if hvd.rank():
            session.session().whole.engine._thread.join()  # rank 0 has shut down
        optimizer.step()
        return values(params)


def test_a_rank_takes_its_last_step_after_others_have_shut_down(procs):
    assert procs(3, _after_the_end) == [[[6.0]]] * 3


def _ended(group: Group) -> str:
    with horovod(group):
        params = [zeros(3)]
        optimizer = summing(params)
        if hvd.rank() == 0:
            return ""
        session.session().whole.engine._thread.join()
        return said(lambda: (backward(params), optimizer.step()))


def test_gradients_for_an_engine_that_has_ended_fail_as_operations_do(procs):
    assert procs(2, _ended)[1].startswith(
        "HorovodInternalError: Horovod operations cannot run any more"
    )


class Meeting(dict[Any, Any]):
    """Two threads that come in here at a time go on together; one that is held off elsewhere is not waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=0.5)

    def meet(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait()

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.meet()

    def pop(self, *args: Any) -> Any:
        self.meet()
        return super().pop(*args)


def _threads(group: Group) -> list[Any]:
    with horovod(group):
        params = [zeros(3), zeros(3)]
        optimizer = summing(params, groups=[params])
        optimizer._reduction._ready = Meeting()
        found: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda param=param: found.append(said(lambda: backward([param])))
            )
            for param in params
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer.synchronize()
        return [found, values(params)]


def test_a_group_that_two_threads_complete_is_sent_once(procs):
    assert procs(2, _threads) == [[["nothing happened"] * 2, [[3.0], [3.0]]]] * 2


def _streams(group: Group) -> list[Any]:
    """Points on streams, of which there are none here, are told apart by the thread that made them."""
    found: list[Any] = []
    with horovod(group), pytest.MonkeyPatch.context() as patch:
        module = "braid.compat.horovod.torch.gradient_reduction"
        patch.setattr(f"{module}.mark", lambda _: threading.current_thread().name)
        patch.setattr(f"{module}.wait_for_points", lambda points, _: found.append(sorted(points)))
        params = [zeros(3), zeros(4), zeros(5), zeros(6)]
        optimizer = summing(params, groups=[params[2:]])
        for number, param in enumerate(params):
            thread = threading.Thread(target=backward, args=([param],), name=f"stream {number}")
            thread.start()
            thread.join()
        optimizer.step()
    return found


def test_gradients_are_sent_behind_the_streams_of_all_hooks_that_they_came_by(procs):
    expected = [["stream 2", "stream 3"], ["stream 0", "stream 1"]]
    assert procs(2, _streams) == [expected, expected]


def _one_device(group: Group) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: group.rank == 0)
        patch.setattr("os.sched_getaffinity", lambda _: {0})
        with horovod(group):
            return session.session().free_cores


def test_ranks_without_a_device_work_beside_others_that_have_one(procs):
    assert procs(2, _one_device) == [False, False]
