"""The beginnings of a push and of a remote call, and `parallelize`, make few calls inside of braid.

Limits are the counts that were reached. What waits for an answer is not counted, since another thread may receive it.
"""

from __future__ import annotations

import torch
from torch import nn

from braid import ps, rpc
from braid.comm import Group
from braid.parallel.tensor_parallel import parallelize
from braid.ps.messages import Push
from rpc_nodes import first_of
from support.call_counts import CallCounts, count_calls

ROUNDS = 60


def _fewest(counts: list[CallCounts]) -> CallCounts:
    return min(counts, key=lambda c: c.calls)


def _pushes(group: Group) -> CallCounts | None:
    counts: list[CallCounts] = []
    with ps.join(group, 1) as node:
        table = node.dense("w", torch.ones(256), lambda params: torch.optim.SGD(params, lr=0.1))
        if node.is_worker:
            x = torch.ones(256)
            for _ in range(ROUNDS):
                counts.append(count_calls(lambda: table.push(x)))
                table.pull()
        else:
            handlers = node.postoffice._handlers
            handle = handlers.get(Push)
            handlers[Push] = lambda push: counts.append(count_calls(lambda: handle(push)))
            node.serve()
    return _fewest(counts) if counts else None


def test_a_push_makes_few_calls_on_the_worker_and_on_the_server(procs):
    _, server, worker = procs(3, _pushes)
    assert worker.calls <= 47, worker.by_function
    assert worker.files <= 18, worker.by_function
    assert server.calls <= 100, server.by_function
    assert server.files <= 28, server.by_function


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_remote_call_makes_few_calls():
    x, counts = torch.ones(256), []
    with first_of(2, allowed_modules=[__name__]):
        for _ in range(ROUNDS):
            futures = []
            counts.append(count_calls(lambda f=futures: f.append(rpc.rpc_async("w1", twice, (x,)))))
            futures[0].wait()
    fewest = _fewest(counts)
    assert fewest.calls <= 55, fewest.by_function
    assert fewest.files <= 25, fewest.by_function


def test_a_remote_call_and_its_answer_make_few_calls_at_the_caller():
    x = torch.ones(256)
    with first_of(2, allowed_modules=[__name__]):
        counts = [count_calls(lambda: rpc.rpc_sync("w1", twice, (x,))) for _ in range(ROUNDS)]
    fewest = _fewest(counts)
    assert fewest.calls <= 116, fewest.by_function


def _divides(group: Group, num_pairs: int) -> CallCounts:
    torch.manual_seed(0)  # ranks need equal parameters
    plan = {str(i): "row" if i % 2 else "column" for i in range(2 * num_pairs)}
    nets = [nn.Sequential(*(nn.Linear(8, 8) for _ in plan)) for _ in range(10)]
    return _fewest([count_calls(lambda net=net: parallelize(net, group, plan)) for net in nets])


def _own(counts: CallCounts) -> int:
    """Calls of the package, without those of a rank that waits for the others."""
    return sum(n for name, n in counts.by_function.items() if name.startswith("parallel/"))


def test_parallelize_makes_few_calls_and_as_many_for_each_layer(procs):
    few, many = (_fewest(procs(2, _divides, num_pairs)) for num_pairs in (1, 2))
    assert _own(few) <= 154, few.by_function
    assert _own(many) - _own(few) <= 112, many.by_function
