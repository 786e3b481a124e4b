"""Messages that are lost, doubled and reordered: each push is applied exactly once."""

from __future__ import annotations

import pytest
import torch

from braid.errors import PeerLostError
from braid.ps import kv
from braid.ps.kv.groups import ALL
from kv_nodes import Simulation, spread
from support.message_faults import Faults

FAULTS = Faults(drop=0.15, duplicate=0.15, delay=0.1, reorder=0.15, delay_s=0.4)
PUSHES, KEYS = 12, spread(6)


def seeds(fast: int, proof: int) -> object:
    return pytest.mark.parametrize(
        "seed",
        [*range(fast), *(pytest.param(n, marks=pytest.mark.proof) for n in range(fast, proof))],
    )


@seeds(8, 500)
@pytest.mark.parametrize("cached", [False, True])
def test_each_push_is_applied_once_and_memory_is_bounded(seed, cached):
    run = Simulation(seed, 2, 3, FAULTS)
    servers = [kv.KVServer(run.nodes[f"server:{n}"], num_cached=1) for n in range(2)]
    handles = [kv.KVServerDefaultHandle() for _ in servers]
    for server, handle in zip(servers, handles, strict=True):
        server.set_request_handle(handle)
    workers = []
    for number in range(3):
        filters = [kv.KeyCache()] if cached else []
        workers.append(kv.KVWorker(run.nodes[f"worker:{number}"], filters=filters))
    stamps = []
    for turn in range(PUSHES):
        for worker in workers:
            keys = KEYS[turn % 2 :]  # two sets of keys, and servers remember one
            stamps.append((worker, worker.push(keys, torch.ones(len(keys)))))
        run.network.run_for(0.05)
    run.until(lambda: all(worker.customer.is_done(stamp) for worker, stamp in stamps))
    outs = [torch.empty(0) for _ in workers]
    pulls = [worker.pull(KEYS, out) for worker, out in zip(workers, outs, strict=True)]
    pushed = torch.full([6], 3.0 * PUSHES)
    pushed[0] = 3.0 * PUSHES / 2
    run.until(lambda: all(w.customer.is_done(p) for w, p in zip(workers, pulls, strict=True)))
    for out in outs:
        assert torch.equal(out, pushed)
    for server in servers:  # the last pull of each worker, and what was under way with it
        assert server._node.executed.num_remembered <= 3 * 2


@seeds(8, 300)
def test_all_nodes_pass_each_barrier_together(seed):
    run = Simulation(seed, 2, 2, FAULTS)
    rounds = 3
    passed: dict[str, int] = dict.fromkeys(run.nodes, 0)
    most_apart = 0
    waiting: dict[str, object] = {}

    def go_on() -> None:
        nonlocal most_apart
        for name, node in run.nodes.items():
            if name not in waiting and passed[name] < rounds:
                if name == "scheduler":
                    opened: list[str] = []
                    node._control.enter_here(ALL, 0, opened.append)
                    waiting[name] = lambda opened=opened: bool(opened)
                else:
                    stamp = node._control.enter(ALL, 0)
                    waiting[name] = lambda node=node, stamp=stamp: node._control.customer.is_done(
                        stamp
                    )
            elif name in waiting and waiting[name]():
                del waiting[name]
                passed[name] += 1
        most_apart = max(most_apart, max(passed.values()) - min(passed.values()))

    def is_over() -> bool:
        go_on()
        return min(passed.values()) == rounds

    run.until(is_over)
    assert most_apart <= 1


@seeds(4, 200)
def test_a_crash_fails_the_requests_that_need_the_server_and_names_it(seed):
    run = Simulation(seed, 2, 1, FAULTS if seed % 2 else None)
    for number in range(2):
        server = kv.KVServer(run.nodes[f"server:{number}"])
        server.set_request_handle(kv.KVServerDefaultHandle())
    worker = kv.KVWorker(run.nodes["worker:0"])
    run.crash("server:1")
    both = worker.push(KEYS, torch.ones(6))
    run.until(lambda: worker.customer.is_done(both))
    with pytest.raises(PeerLostError, match="server:1 is lost: "):
        worker.wait(both)
    first = worker.push(KEYS[:2], torch.ones(2))
    run.until(lambda: worker.customer.is_done(first))
    worker.wait(first)
    assert run.nodes["worker:0"].dead_nodes() == [10]
