"""Programs of remote calls give what one process gives, also with data parallelism in contexts."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from program_jobs import run_program

from braid import rpc
from braid.errors import CommError
from braid.rpc import dist_autograd
from braid.rpc.agent import Agent
from braid.rpc.caller import OutgoingCall
from example_runs import EXAMPLES, run_example
from rpc_nodes import first_of

OPENED = threading.Event()
PROGRAMS = {
    "rpc_pipeline.py": ("master:1", "stage:2"),
    "rpc_embeddings.py": ("ps:1", "trainer:2"),
    "rpc_parameter_server.py": ("ps:1", "trainer:2"),
}
TORCH_DDP = """
import torch

from braid.compat.torch_rpc import dist_autograd, rpc

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
rpc.init_rpc(f"w{rank}")
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
ddp = torch.nn.parallel.DistributedDataParallel(model)
for step in range(2):
    torch.manual_seed(step)
    inputs = torch.randn(2, 4, 3)
    with dist_autograd.context() as context:
        there = rpc.rpc_sync(f"w{1 - rank}", torch.mul, (inputs[rank], 2.0))
        loss = rpc.rpc_sync(f"w{1 - rank}", torch.sum, (ddp(there),))
        dist_autograd.backward(context, [loss])
        grads = dist_autograd.get_gradients(context)
        expected = 2 * inputs.sum(1).mean(0)
        assert torch.allclose(grads[model.weight], expected), (grads, expected)
        assert model.weight.grad is None
torch.distributed.barrier()
rpc.shutdown()
print("averaged")
"""
TORCH_DDP_AROUND_A_CALL = """
import torch
from torch import nn

from braid.compat.torch_rpc import dist_autograd, rpc

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
rpc.init_rpc(f"w{rank}")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x, call):
        return self.second(call(torch.mul, (self.first(x), 3.0)))


def batch(step, rank):
    torch.manual_seed(2 * step + rank)
    return torch.randn(4, 3)


def expected(step, ranks):
    model, total = Model(), 0
    for each in ranks:
        out = model(batch(step, each), lambda function, args: function(*args))
        total += out.square().sum() / len(ranks)
    return torch.autograd.grad(total, [*model.parameters()])


def check(model, forward, step, ranks=(0, 1)):
    with dist_autograd.context() as context:
        there = f"w{1 - rank}"
        out = forward(batch(step, rank), lambda function, args: rpc.rpc_sync(there, function, args))
        dist_autograd.backward(context, [out.square().sum()])
        grads = dist_autograd.get_gradients(context)
    for param, grad in zip(model.parameters(), expected(step, ranks), strict=True):
        assert torch.allclose(grads[param], grad, atol=1e-5), (grads[param], grad)
        assert param.grad is None


for settings in ({}, {"gradient_as_bucket_view": True}):
    for way in ("__call__", "forward"):
        model = Model()
        ddp = nn.parallel.DistributedDataParallel(model, **settings)
        for step in range(3):
            check(model, getattr(ddp, way), step)
        with ddp.join(divide_by_initial_world_size=False):  # uneven inputs
            for step in range(2 - rank):
                check(model, getattr(ddp, way), step, (0, 1) if step == 0 else (0,))
for settings in ({"static_graph": True}, {"find_unused_parameters": True}):
    model = Model()
    ddp = nn.parallel.DistributedDataParallel(model, **settings)
    try:
        check(model, ddp, 0)
    except RuntimeError as exc:
        assert "use braid.DistributedDataParallel" in str(exc)
    else:
        raise AssertionError(settings)
    torch.distributed.barrier()
    check(model, nn.parallel.DistributedDataParallel(model), 0)  # as the error says
torch.distributed.barrier()
rpc.shutdown()
print("averaged")
"""


@pytest.mark.procs
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_what_one_process_gives(procs, program):
    roles = ",".join(PROGRAMS[program])
    first, *_ = run_program(procs, 3, EXAMPLES / program, BRAID_ROLES=roles)
    assert "equal one process: True" in first


@pytest.mark.proof
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs_with_the_command_in_its_docstring(program, tmp_path):
    roles = [word for each in PROGRAMS[program] for word in ("--role", each)]
    assert f"braid run {' '.join(roles)} examples/{program}" in (EXAMPLES / program).read_text()
    assert "equal one process: True" in run_example(program, tmp_path / "run", *roles)


@pytest.mark.procs
@pytest.mark.parametrize("program", [TORCH_DDP, TORCH_DDP_AROUND_A_CALL])
def test_ddp_of_torch_averages_in_contexts(procs, tmp_path, program):
    script = tmp_path / "program.py"
    script.write_text(program)
    assert run_program(procs, 2, script) == ["averaged\n"] * 2


def test_hooks_see_the_gradients_of_a_context():
    with first_of(2):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        plain = torch.tensor([3.0, 4.0], requires_grad=True)
        x.grad = kept = torch.tensor([7.0, 7.0])
        seen: list[list[float]] = []

        def hook(leaf: torch.Tensor) -> None:
            seen.append(leaf.grad.tolist())
            leaf.grad = None if len(seen) == 3 else leaf.grad * 10

        x.register_post_accumulate_grad_hook(hook)
        with dist_autograd.context() as context:
            loss = rpc.rpc_sync("w1", torch.mul, (x, plain)).sum()
            dist_autograd.backward(context, [loss], retain_graph=True)
            first = dict(dist_autograd.get_gradients(context))
            dist_autograd.backward(context, [loss], retain_graph=True)
            grads = dist_autograd.get_gradients(context)
            assert first[x].tolist() == [30, 40]
            assert first[plain].tolist() == [1, 2]
            assert grads[x].tolist() == [330, 440]
            assert grads[plain].tolist() == [2, 4]
            dist_autograd.backward(context, [loss])
            assert x not in dist_autograd.get_gradients(context)
        assert seen == [[3, 4], [33, 44], [333, 444]]
        assert x.grad is kept
        assert kept.tolist() == [7, 7]
        assert plain.grad is None
        dist_autograd.run_hooks([plain, torch.ones(1)])  # what needs no gradient takes no hook
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [rpc.rpc_sync("w1", torch.sum, (plain,))])
            assert dist_autograd.get_gradients(context)[plain].tolist() == [1, 1]


def test_a_node_that_leaves_drops_its_values():
    with first_of(2) as agents:
        mine = rpc.RRef([rpc.remote("w1", torch.add, (torch.ones(1), 1))])
        assert agents[0].references.future_of(mine._ref).done()
    with pytest.raises(CommError, match="no longer has the value"):
        mine.local_value()


def fails() -> None:
    msg = "no such thing"
    raise LookupError(msg)


@rpc.batch(max_size=1, max_wait_s=0.0)
def fails_in_a_batch(items: list[object]) -> list[object]:
    return fails()


def test_errors_keep_nothing_alive():
    def use(agents: list[Agent]) -> None:
        made, future = rpc.remote("w1", fails), rpc.rpc_async("w1", fails)
        batched = rpc.rpc_async("w1", fails_in_a_batch, (1,))
        mine = rpc.remote("w0", fails)
        for wait in (made.to_here, future.wait, batched.wait, mine.to_here, future.wait):
            with pytest.raises(LookupError, match="no such thing") as caught:
                wait()
            assert "in fails" in str(caught.value), "the traceback is in the text"

    with first_of(2, allowed_modules=[__name__]) as agents:
        use(agents)
        left = [weakref.ref(each) for each in agents]
    del agents
    gc.collect()
    assert [each() for each in left] == [None, None]


def opens() -> None:
    OPENED.set()


def test_a_node_hears_while_its_backward_is_blocked():
    OPENED.clear()
    with first_of(2, allowed_modules=[__name__]) as agents, dist_autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        y = rpc.rpc_sync("w1", torch.mul, (x, 2.0)) * 3
        was_opened: list[bool] = []

        def hook(grad: torch.Tensor) -> None:
            assert grad.tolist() == [1, 1]
            threading.Thread(
                target=agents[1].caller.call_async, args=(OutgoingCall("w0", opens),)
            ).start()
            was_opened.append(OPENED.wait(10))

        y.register_hook(hook)
        dist_autograd.backward(context, [y.sum()])
        assert was_opened == [True]
        assert dist_autograd.get_gradients(context)[x].tolist() == [6, 6]
