"""Dependencies without data, and copies and waits: the graph's shape and the order of backward."""

from __future__ import annotations

import threading

import pytest
import torch

from braid.comm.autograd import checkpoint, copy, depend, fork, join, phony, streams, wait
from braid.comm.autograd.streams import CPU_STREAM

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices to copy between"
)
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _logged(x: torch.Tensor, name: str, log: list[str]) -> torch.Tensor:
    x = x * 1
    x.register_hook(lambda _: log.append(name))
    return x


def _used_elsewhere(x: torch.Tensor, log: list[str]) -> torch.Tensor:
    """Uses made by a new thread: autograd, which counts per thread, takes them for old ones and runs them last."""
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(_logged(x, "used second", log)))
    thread.start()
    thread.join()
    return found[0]


def test_uses_of_the_second_run_backward_before_what_made_the_first():
    for tied, expected in (
        (False, ["made first", "used second"]),
        (True, ["used second", "made first"]),
    ):
        log: list[str] = []
        leaf = torch.ones(1, requires_grad=True)
        for _ in range(5):
            leaf * 1  # so that this thread's count is ahead
        first, second = _logged(leaf, "made first", log), leaf * 1
        if tied:
            first, second = depend(first, second)
        total = first * 2 + _used_elsewhere(second, log) * 3
        total.backward()
        assert log == expected
        assert leaf.grad.item() == 5.0


def _nodes(x: torch.Tensor) -> list[str]:
    """Names of the functions that lead to `x`, nearest first."""
    found, todo = [], [x.grad_fn]
    while todo:
        node = todo.pop(0)
        if node is not None:
            found.append(type(node).__name__)
            todo += [parent for parent, _ in node.next_functions]
    return found


def test_fork_and_join_add_one_node_each_that_save_nothing():
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        first, edge = fork(a.exp())
        second = join(b.sin(), edge)
    assert len(saved) == 2  # those of exp and sin
    assert edge.shape == (0,)
    assert edge.grad_fn is first.grad_fn
    assert _nodes(first) == ["_LinearMapBackward", "ExpBackward0", "AccumulateGrad"]
    assert _nodes(second) == [
        "_LinearMapBackward",
        "SinBackward0",
        "_LinearMapBackward",
        "AccumulateGrad",
        "ExpBackward0",
        "AccumulateGrad",
    ]


def test_tensors_that_require_no_grad_are_handed_on():
    x, needs = torch.ones(2), torch.ones(2, requires_grad=True)
    same, edge = fork(x)
    assert same is x
    assert not edge.requires_grad
    assert join(x, edge) is x
    assert join(needs, edge) is not x
    # an edge of a graph makes what it is joined to part of the graph
    _, edge = fork(needs)
    joined = join(x, edge)
    assert joined.requires_grad
    joined.sum().backward()
    assert needs.grad.tolist() == [0.0, 0.0]
    with torch.no_grad():
        assert fork(needs)[0] is needs


def test_dependencies_inside_a_checkpoint_change_no_gradient():
    def body(x: torch.Tensor) -> torch.Tensor:
        y, z = depend(x.sin(), x.cos())
        return (y * z).exp()

    x = torch.linspace(0, 1, 3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(body(x).sum(), x)
    (found,) = torch.autograd.grad(checkpoint(body, x).sum(), x)
    assert torch.equal(found, expected)
    assert torch.autograd.gradgradcheck(lambda t: checkpoint(body, t), x, torch.ones_like(x))


def test_there_is_one_phony_per_device_and_answer():
    cpu = torch.device("cpu")
    with torch.inference_mode():
        made_first_here = phony(cpu, True)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(phony(cpu, True)))
    thread.start()
    thread.join()
    assert found[0] is made_first_here
    assert not made_first_here.is_inference()
    assert phony(cpu, False) is not made_first_here
    assert phony(cpu, False).requires_grad is False


def test_on_the_cpu_streams_are_one_and_copies_share_memory():
    cpu = torch.device("cpu")
    assert (
        {streams.new_stream(cpu), streams.current_stream(cpu), streams.default_stream(cpu)}
    ) == {CPU_STREAM}
    assert streams.device_of(CPU_STREAM) == cpu
    streams.wait_stream(CPU_STREAM, CPU_STREAM)
    streams.synchronize(CPU_STREAM)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    count = torch.arange(2)
    streams.record_stream(x, CPU_STREAM)
    with streams.use_stream(CPU_STREAM):
        y, same_count = copy(x, count, source=CPU_STREAM, destination=CPU_STREAM)
        (z,) = wait(y, waiting=CPU_STREAM, awaited=CPU_STREAM)
    assert z.data_ptr() == x.data_ptr()
    assert torch.equal(same_count, count)
    assert not same_count.requires_grad
    torch.relu_(z)  # results may be changed in place
    z.square().sum().backward()
    assert x.grad.tolist() == [2.0] * 3


def test_copies_and_waits_can_be_differentiated_twice():
    def moved(t: torch.Tensor) -> torch.Tensor:
        (y,) = copy(t, source=CPU_STREAM, destination=CPU_STREAM)
        (y,) = wait(y, waiting=CPU_STREAM, awaited=CPU_STREAM)
        return y**3

    x = torch.linspace(1, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(moved, x)
    assert torch.autograd.gradgradcheck(moved, x, torch.ones_like(x))


@needs_a_gpu
def test_what_one_stream_makes_another_uses_after_waiting():
    device = torch.device("cuda", 0)
    compute, side = streams.current_stream(device), streams.new_stream(device)
    host = torch.ones(1 << 20, requires_grad=True)
    with streams.use_stream(side):
        (x,) = copy(host, source=CPU_STREAM, destination=side)
        for _ in range(50):
            x = x * 1.01
    (y,) = wait(x, waiting=compute, awaited=side)
    (back,) = copy(y * 2, source=compute, destination=CPU_STREAM)
    assert back[0].item() == pytest.approx(2 * 1.01**50, rel=1e-4)
    back.sum().backward()
    assert host.grad[0].item() == pytest.approx(2 * 1.01**50, rel=1e-4)


@needs_two_gpus
def test_a_copy_between_devices_sends_the_gradient_back():
    devices = [torch.device("cuda", index) for index in range(2)]
    there = [streams.new_stream(device) for device in devices]
    compute = [streams.current_stream(device) for device in devices]
    x = torch.ones(1 << 20, device=devices[0], requires_grad=True)
    (y,) = wait(x * 2, waiting=there[0], awaited=compute[0])
    (y,) = copy(y, source=there[0], destination=there[1])
    (y,) = wait(y, waiting=compute[1], awaited=there[1])
    y.square().sum().backward()
    assert x.grad[0].item() == 8.0
