"""Tables on servers train as one process does, and say what is wrong."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from training import said_by

from braid import ps
from braid.comm import Group
from braid.errors import (
    CommError,
    CommTimeout,
    ConfigError,
    PeerLostError,
    RendezvousError,
    StaleError,
)
from example_runs import run_example

STEPS, SHAPE = 12, (5, 7)
MAKE = partial(torch.optim.AdamW, lr=0.1)


def gradient(values: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * worker + step)
    return values + torch.randn(values.shape, generator=generator)


def _train(group: Group, servers: int, consistency: ps.Consistency) -> Any:
    with ps.join(group, servers) as node:
        table = node.dense("w", torch.ones(SHAPE), MAKE, consistency)
        if not node.is_worker:
            node.serve()
            return None
        for step in range(STEPS):
            table.push(gradient(table.pull(), node.number, step))
        return table.clock, table.pull().clone()


def _alone(workers: int) -> torch.Tensor:
    values = torch.nn.Parameter(torch.ones(SHAPE))
    optimizer = MAKE([values])
    for step in range(STEPS):
        grads = [gradient(values.detach(), worker, step) for worker in range(workers)]
        values.grad = sum(grads[1:], grads[0].clone()) * (1 / workers)
        optimizer.step()
    return values.detach()


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 2), (3, 1), (1, 3)])
def test_bulk_synchronous_training_has_the_bits_of_one_process(world, servers, workers):
    results = world(1 + servers + workers, _train, servers, ps.BSP)
    assert results[: 1 + servers] == [None] * (1 + servers)
    for clock, values in results[1 + servers :]:
        assert clock == STEPS
        assert torch.equal(values, _alone(workers))


@pytest.mark.parametrize("staleness", [2, math.inf])
def test_stale_values_train_too(world, staleness):
    consistency = ps.Consistency(staleness=staleness)
    for clock, values in world(5, _train, 2, consistency)[3:]:
        assert clock == STEPS
        assert values.abs().mean() < 1


def _mistakes(group: Group) -> list[str]:
    with ps.join(group, 1) as node:
        table = node.dense("w", torch.ones(4), MAKE)
        said = [
            said_by(lambda: node.dense("w", torch.ones(4), MAKE), ConfigError),
            said_by(lambda: node.dense("n", torch.ones(4).int(), MAKE), ConfigError),
            said_by(
                lambda: node.dense("q", torch.ones(4), MAKE, ps.Consistency(quorum=2)), ConfigError
            ),
        ]
        if not node.is_worker:
            said.append(said_by(table.pull, ConfigError))
            node.serve()
            return said
        other = node.dense("only here", torch.ones(4), MAKE)
        more = ps.DenseTable(table._customer, replace(table._spec, num_shards=2), torch.ones(4))
        wrong = ps.DenseTable(table._customer, table._spec, torch.ones(5))
        said += [
            said_by(node.serve, ConfigError),
            said_by(lambda: table.push(torch.ones(3)), ConfigError),
            said_by(lambda: table.push(torch.ones(4).double()), ConfigError),
            said_by(other.pull, CommError),
            said_by(lambda: wrong.wait(wrong.push(torch.ones(5))), CommError),
            said_by(lambda: table.wait(table.set_lr(0.1, -1)), CommError),
            said_by(lambda: more.wait(more.set_lr(0.1)), CommError),
            said_by(lambda: table.wait(table.set_lr(math.nan)), CommError),
            said_by(lambda: table.set_lr("0.1"), ConfigError),
            said_by(lambda: table.set_lr(0.1, 2.5), ConfigError),
            said_by(lambda: table.set_consistency("bsp"), ConfigError),
            said_by(lambda: node.barrier(5), ConfigError),
        ]
        table.push(torch.ones(4))
        assert table.pull().sum() != 4, "the server lives on"
        return said


def test_mistakes_are_named_and_the_server_lives_on(world):
    scheduler, server, worker = world(3, _mistakes)
    assert (
        "only workers can pull and push table 'w': call serve() on servers"
        in server[3]
        == scheduler[3]
    )
    twice, dtype, quorum, role, shape, precision, unknown, model, clock, *last = worker
    assert "a table named 'w' already exists" in twice
    assert "needs floating-point values" in dtype
    assert "quorum 2 exceeds the 1 workers" in quorum
    assert "this rank is worker 0: call serve() unless node.is_worker" in role
    assert (
        "table 'w' has torch.float32 and shape [4], got a gradient of torch.float32 and shape [3]"
        in shape
    )
    assert "got a gradient of torch.float64 and shape [4]" in precision
    assert (
        "server:0 refused the request: the server does not have the table 'only here', only w"
        in unknown
    )
    assert "expected grad float32[4], got float32[5]" in model
    assert "settings cannot change at clock -1" in clock
    assert "table 'w' has 1 shards here, but the request is for 1" in last[0]
    assert "a learning rate must be at least 0 and finite, got nan" in last[1]
    assert [each.removeprefix("ConfigError: ") for each in last[2:]] == [
        "a learning rate must be a number, got '0.1'",
        "a clock must be a whole number, got 2.5",
        "a consistency must be a ps.Consistency, got 'bsp'",
        "the name of a barrier must be a text, got 5",
    ]


def _lost(group: Group) -> str:
    node = ps.join(group, 1)
    table = node.dense("w", torch.ones(4), MAKE)
    try:
        if not node.is_worker:
            node.serve()
        elif node.number == 0:
            table.push(torch.ones(4))
            table.pull()
        else:
            table.push(torch.ones(4))
            table.pull()
            msg = "no data"
            raise KeyError(msg)
        table.pull()
        table.push(torch.ones(4))
        table.pull()
    except (PeerLostError, KeyError, ConfigError) as exc:
        node.__exit__(type(exc), exc, None)
        return str(exc)
    return "no error"


def test_a_lost_worker_is_named_with_who_waits_for_it(world):
    scheduler, server, waits, _ = world(4, _lost)
    for each in (scheduler, server, waits):
        assert each.startswith("lost worker 1: it raised KeyError: 'no data'")


def _shrinks(group: Group) -> Any:
    node = ps.join(group, 1, ps.Options(on_worker_loss="shrink"))
    table = node.dense("w", torch.zeros(4), partial(torch.optim.SGD, lr=1.0))
    if not node.is_worker:
        with node:
            node.serve()
        return None
    table.pull()
    if node.number == 1:
        node.__exit__(KeyError, None, None)
        return None
    with node:
        for _ in range(3):
            table.push(torch.ones(4))
        return table.pull().tolist()


def test_a_run_can_shrink_to_the_workers_that_are_left(world):
    assert world(4, _shrinks)[2] == [-3.0] * 4


def _replaced(group: Group, spares: int) -> Any:
    node = ps.join(group, 1, ps.Options(on_worker_loss="replace"), spares=spares)
    table = node.dense("w", torch.zeros(4), partial(torch.optim.SGD, lr=1.0))
    if not node.is_worker:
        with node:
            node.serve()
        return node.role
    with node:
        begin = node.resume()
        for step in range(begin, 6):
            if step == 3 and node.number == 1 and begin == 0:
                table.pull()
                node.__exit__(KeyError, None, None)
                return "lost"
            table.push(-torch.ones(4))
            table.pull()
        return node.number, begin, table.pull().tolist()


def test_a_spare_takes_the_place_of_a_lost_worker(world):
    results = world(5, _replaced, 1)
    assert results[2:] == [(0, 0, [6.0] * 4), "lost", (1, 3, [6.0] * 4)]


def _nobody_is_left(group: Group) -> str:
    try:
        return str(_replaced(group, 0))
    except PeerLostError as exc:
        return str(exc)


def test_a_loss_without_a_spare_is_named(world):
    results = world(4, _nobody_is_left)
    assert results[3] == "lost"
    assert all("lost worker 1: " in each for each in results[:3])
    assert all("No spare is left for it" in each for each in results[:3])


def _dealt(group: Group) -> Any:
    node = ps.join(group, 1, ps.Options(on_worker_loss="shrink"))
    table = node.dense("w", torch.zeros(1), partial(torch.optim.SGD, lr=1.0))
    if not node.is_worker:
        with node:
            node.serve()
        return None
    table.pull()
    finished = []
    for samples in node.samples("train", 95, shard_size=10, epochs=2):
        if node.number == 1:
            node.__exit__(KeyError, None, None)
            return []
        finished += samples
    with node:
        return finished


def test_samples_of_a_lost_worker_go_to_others(world):
    results = world(5, _dealt)[2:]
    assert sorted(number for own in results for number in own) == sorted([*range(95), *range(95)])
    assert results[1] == []


def _changes(group: Group) -> Any:
    with ps.join(group, 1) as node:
        table = node.dense("w", torch.zeros(2), partial(torch.optim.SGD, lr=1.0))
        if not node.is_worker:
            node.serve()
            return None
        table.set_consistency(ps.Consistency(staleness=math.inf), 2)
        table.set_consistency(ps.BSP, 4)
        values = []
        for step in range(6):
            values.append(table.pull()[0].item())
            table.push(torch.full([2], float(step)))
        return values, table.pull()[0].item()


def test_consistency_changes_at_a_clock(world):
    first, second = world(4, _changes)[2:]
    assert first[0][:2] == second[0][:2] == [0.0, 0.0]
    # without the other's pushes of clocks 2 and 3, with the first of them, or with both
    assert {first[0][2], second[0][2]} <= {-1.0, -2.0, -3.5}
    assert first[0][4:] == second[0][4:] == [-6.0, -10.0]
    assert first[1] == second[1] == -15.0


def _sums(group: Group) -> Any:
    with ps.join(group, 2) as node:
        table = node.dense("w", torch.zeros(3), None, ps.Consistency(aggregate="sum"))
        if not node.is_worker:
            node.serve()
            return None
        sums = []
        for step in range(3):
            table.push(torch.full([3], float(step + node.number)))
            sums.append(table.pull()[0].item())
        return sums


def test_servers_without_an_optimizer_only_sum(world):
    assert world(5, _sums)[3:] == [[1.0, 3.0, 5.0]] * 2


def _large(group: Group) -> Any:
    values = torch.arange(3 << 18, dtype=torch.float32)
    with ps.join(group, 2, ps.Options(replicas=1)) as node:
        table = node.dense("w", values, partial(torch.optim.SGD, lr=1.0))
        if not node.is_worker:
            node.serve()
            return len({shard.virtual for shard in node.server.shards}) if node.server else 0
        stamps = [table.push_async(torch.ones(len(values))) for _ in range(3)]
        out = torch.empty(len(values))
        assert table.pull(out=out) is out
        for stamp in stamps:
            table.wait(stamp)
        return torch.equal(out, values - 3)


def test_pushes_overlap_and_large_tables_have_several_shards(world):
    assert world(4, _large) == [0, 3, 3, True]


def _roles(group: Group) -> list[str]:
    return [
        said_by(lambda: ps.join(group), ConfigError),
        said_by(lambda: ps.join(group, 1), ConfigError),
    ]


def test_roles_are_checked(world, monkeypatch):
    monkeypatch.delenv("BRAID_SERVERS", raising=False)
    ((none, all_servers),) = world(1, _roles)
    assert "the number of servers is unknown: pass servers=" in none
    assert "1 ranks with 1 servers: a parameter server has one scheduler" in all_servers


@pytest.mark.launcher
@pytest.mark.proof
def test_the_example_learns_digits_on_two_servers_and_two_workers(tmp_path):
    roles = ("--servers", "2", "--workers", "2")
    shown = run_example("ps_logistic.py", tmp_path / "run", *roles)
    for worker in (0, 1):
        assert f"worker {worker}: 95.6% right, as one process: True" in shown


def _differs(group: Group, values: bool) -> str:
    node = ps.join(group, 2)
    first = torch.zeros(4) + (group.rank if values else 0)
    size = 4 if values or not node.is_worker else 5
    try:
        with node:
            table = node.dense("w", first[:4] if size == 4 else torch.zeros(5), MAKE)
            if not node.is_worker:
                node.serve()
            else:
                table.pull()
    except (PeerLostError, RendezvousError) as exc:  # who comes later meets nobody
        return str(exc)
    return "nothing"


def test_tables_that_differ_between_nodes_are_refused(world):
    by_shape = world(4, _differs, False)
    assert "table 'w' differs: " in by_shape[0]
    assert "torch.float32[5]" in by_shape[0]
    by_values = world(4, _differs, True)
    assert "table 'w' begins with other values on server:" in by_values[0]
    assert "nothing" not in {*by_shape, *by_values}


def _forgets(group: Group) -> Any:
    with ps.join(group, 1) as node:
        table = node.dense("w", torch.zeros(4), partial(torch.optim.SGD, lr=1.0))
        if not node.is_worker:
            node.serve()
            return None
        table.pull()
        with pytest.raises(ConfigError):
            table.push_async(torch.empty(4, device="meta"))
        assert table.clock == 0, "what was not pushed is no clock"
        if node.number == 0:  # the other has not pushed: nothing waits for the answer any more
            table.push(torch.ones(4))
            said = said_by(lambda: table.pull(timeout_s=0.2), CommTimeout)
            node.barrier()
        else:
            said = ""
            node.barrier()
            table.push(torch.ones(4))
        return said, table.pull().tolist()


def test_requests_that_fail_leave_nothing_behind(world):
    first, second = world(4, _forgets)[2:]
    assert "server:0 did not answer" in first[0]
    assert "server:0: worker 0 waits at clock 1 for pushes from 1 (at clock 0)" in first[0]
    assert first[1] == second[1] == [-1.0] * 4


def _has_a_slow_worker(group: Group, stepper: Any) -> list[float]:
    alone = ps.Consistency(staleness=math.inf, aggregate="sum")
    with ps.join(group, 1) as node:
        table = node.dense("w", torch.zeros(1), stepper, alone)
        if not node.is_worker:
            node.serve()
            return []
        if node.number == 1:
            table.wait(table.set_lr(0.25, at_clock=1))
        node.barrier("the rate of clock 1 is set")
        if node.number == 0:
            table.wait(table.push(-torch.ones(1)))
            table.wait(table.push(-torch.ones(1)))
        node.barrier("worker 0 has pushed twice")
        if node.number == 1:
            table.push(-torch.ones(1))
            table.wait(table.push(-torch.ones(1)))
        node.barrier("all have pushed")
        return table.pull().tolist()


@pytest.mark.parametrize("stepper", [partial(torch.optim.SGD, lr=1.0), ps.SGD(lr=1.0)])
def test_clocks_before_a_change_keep_their_learning_rate(world, stepper):
    assert world(4, _has_a_slow_worker, stepper)[2:] == [[2.5], [2.5]]


def _ends_with_a_refused_push(group: Group) -> list[str]:
    node = ps.join(group, 1)
    table = node.dense("w", torch.zeros(4), MAKE)
    if not node.is_worker:
        node.serve()
        node.close()
        return []
    ps.DenseTable(table._customer, table._spec, torch.ones(5)).push(torch.ones(5))
    return [said_by(node.close, CommError), said_by(node.postoffice.van.try_recv, StaleError)]


def test_a_worker_whose_last_push_is_refused_closes_its_van(world):
    refused, closed = world(3, _ends_with_a_refused_push)[2]
    assert "expected grad float32[4], got float32[5]" in refused
    assert "closed" in closed


def _asks_for_nothing(group: Group) -> list[float] | None:
    with ps.join(group, 1) as node:
        table = node.dense("w", torch.zeros(4), partial(torch.optim.SGD, lr=1.0))
        if not node.is_worker:
            node.serve()
        elif node.number == 0:
            table.push(torch.ones(4))
            return table.pull().tolist()
    return None


def test_a_worker_without_work_holds_up_nobody(world):
    assert world(4, _asks_for_nothing)[2] == [-1.0] * 4


def _never_comes(group: Group) -> str:
    if group.rank == 3:  # knows the scheduler, and never joins
        ps.join(group, 1).postoffice.close()
        return ""
    node = ps.join(group, 1)
    table = node.dense("w", torch.zeros(4), partial(torch.optim.SGD, lr=1.0))
    if node.is_worker:
        said = said_by(lambda: table.pull(timeout_s=0.3), CommTimeout)
        node.__exit__(CommTimeout, None, None)
        return said
    with node, contextlib.suppress(PeerLostError):
        node.serve()
    return ""


def test_who_has_not_joined_is_named(world, monkeypatch):
    monkeypatch.setattr("braid.ps.scheduler.LATE_S", 0.2)  # for nodes that never come
    assert "scheduler: worker 1 did not join" in world(4, _never_comes)[2]
