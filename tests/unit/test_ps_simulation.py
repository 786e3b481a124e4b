"""Servers that die, messages that are lost: nothing accepted is lost, nothing is applied twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from braid.ps import BSP, Consistency, Options
from braid.ps.messages import Here
from braid.ps.protocol.scheduler_state import CallSpare, SchedulerState
from braid.runtime.message import Delivery, PeerLost
from ps_simulation import NUMEL, Simulation
from support.message_faults import Faults

ADAM = partial(torch.optim.AdamW, lr=0.1)
ADD = partial(torch.optim.SGD, lr=1.0)
FAULTS = Faults(drop=0.1, duplicate=0.1, delay=0.1, reorder=0.1, delay_s=0.2)
CLOCKS = 6


def noisy(values: torch.Tensor, worker: int, clock: int) -> torch.Tensor:
    """Return a gradient that depends on the values, so that each mistake shows."""
    generator = torch.Generator().manual_seed(1000 * worker + clock)
    return values + torch.randn(values.shape, generator=generator)


def counting(values: torch.Tensor, worker: int, clock: int) -> torch.Tensor:
    """Return a push that adds one in the column of this worker."""
    del values, clock
    return -torch.eye(NUMEL)[worker]


def alone(workers: int, clocks: int, rate: Callable[[int], float] = lambda _: 0.1) -> torch.Tensor:
    values = torch.nn.Parameter(torch.zeros(NUMEL))
    optimizer = ADAM([values])
    for clock in range(clocks):
        grads = [noisy(values.detach(), worker, clock) for worker in range(workers)]
        values.grad = sum(grads[1:], grads[0].clone()) * (1 / workers)
        optimizer.param_groups[0]["lr"] = rate(clock)
        optimizer.step()
    return values.detach()


def stepping_with_adam(seed: int, **settings: Any) -> Simulation:
    """Return a bulk synchronous run in which each lost or repeated gradient shows."""
    return Simulation(seed, consistency=BSP, optimizer=ADAM, gradient=noisy, **settings)


def check_bits(run: Simulation, clocks: int, workers: int = 2) -> None:
    """Check that all workers have the values of one process."""
    for worker in run.workers.values():
        assert torch.equal(worker.pulled[-1], alone(workers, clocks))


def seeds(fast: int, proof: int, *others: int) -> object:
    """Return the seeds below `proof`: those below `fast` and `others` have no mark "proof"."""
    rest = [seed for seed in range(fast, proof) if seed not in others]
    return pytest.mark.parametrize(
        "seed",
        [*range(fast), *others, *(pytest.param(seed, marks=pytest.mark.proof) for seed in rest)],
    )


@seeds(4, 500)
def test_messages_that_are_lost_doubled_and_reordered_change_no_bit(seed):
    run = stepping_with_adam(seed, workers=3, faults=FAULTS)
    run.run()
    check_bits(run, CLOCKS, workers=3)


@seeds(6, 1000)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_whose_servers_die_has_the_bits_of_one_without_failure(seed, replicas):
    run = stepping_with_adam(
        seed,
        servers=4,
        options=Options(replicas=replicas, on_worker_loss="wait"),
        faults=FAULTS if seed % 2 else None,
    )
    for number in run.random.sample(range(4), replicas):
        run.begin(run.random.random() * 2)
        run.crash(f"server:{number}", silent=run.random.random() < 0.3)
        if run.random.random() < 0.5:
            run.network.run_for(run.random.random())
            run.start("server", 4 + number)
        if replicas == 2:
            run.network.run_for(4)  # detected, and copied again, before the next one
    run.run()
    check_bits(run, CLOCKS)


@seeds(6, 1000)
@pytest.mark.parametrize("staleness", [1, 3, math.inf])
def test_each_accepted_push_is_applied_once_and_staleness_is_bounded(seed, staleness):
    workers = 3
    run = Simulation(
        seed,
        servers=3,
        workers=workers,
        consistency=Consistency(staleness=staleness, aggregate="sum"),
        optimizer=ADD,
        gradient=counting,
        options=Options(replicas=1, on_worker_loss="wait"),
        faults=FAULTS if seed % 2 else None,
    )
    run.begin(run.random.random() * 2)
    run.crash(f"server:{run.random.randrange(3)}", silent=run.random.random() < 0.3)
    run.run()
    run.network.run_for(4)  # a silent death may still be unknown
    assert run.values()[:workers].tolist() == [CLOCKS] * workers
    for number, worker in run.workers.items():
        for clock, values in enumerate(worker.pulled):
            assert values[number] == clock
            assert values[:workers].min() >= clock - staleness


def a_task(values: torch.Tensor, worker: int, clock: int) -> torch.Tensor:
    """Return a push that adds one in the column of the task, whichever worker runs it."""
    del values, worker
    return -torch.eye(NUMEL)[clock]


@seeds(4, 500)
@pytest.mark.parametrize("staleness", [0, 2, math.inf])
def test_a_task_that_several_workers_run_is_added_once(seed, staleness):
    run = Simulation(
        seed,
        servers=3,
        workers=3,
        consistency=Consistency(staleness=staleness, aggregate="sum"),
        optimizer=ADD,
        gradient=a_task,
        options=Options(replicas=1, on_worker_loss="wait"),
        faults=FAULTS if seed % 2 else None,
        runs_tasks=True,
    )
    run.begin(run.random.random() * 2)
    run.crash(f"server:{run.random.randrange(3)}", silent=run.random.random() < 0.3)
    if seed % 3:
        run.start("server", 3)
    run.run()
    run.network.run_for(4)  # a silent death may still be unknown
    assert run.values().tolist() == [1.0] * NUMEL


@seeds(4, 500)
def test_late_pushes_of_a_quorum_are_applied_once_whichever_server_dies(seed):
    workers = 3
    run = Simulation(
        seed,
        servers=3,
        workers=workers,
        consistency=Consistency(quorum=2, late="apply", aggregate="sum"),
        optimizer=ADD,
        gradient=counting,
        options=Options(replicas=1, on_worker_loss="wait"),
        faults=FAULTS if seed % 2 else None,
    )
    run.begin(run.random.random() * 2)
    run.crash(f"server:{run.random.randrange(3)}", silent=run.random.random() < 0.3)
    run.run()
    run.network.run_for(4)  # a silent death may still be unknown
    assert run.values()[:workers].tolist() == [CLOCKS] * workers


RULES = {
    "bsp": Consistency(aggregate="sum"),
    "ssp": Consistency(staleness=1, aggregate="sum"),
    "quorum": Consistency(quorum=2, late="apply", aggregate="sum"),
    "asynchronous": Consistency(staleness=math.inf, aggregate="sum"),
}


@seeds(6, 300, 18, 39)  # seed 18 delays a join until after a new directory, seed 39 loses a call
@pytest.mark.parametrize("policy", ["shrink", "wait", "replace"])
@pytest.mark.parametrize("rule", RULES)
def test_each_accepted_push_of_a_worker_that_was_stopped_is_applied(seed, rule, policy):
    run = Simulation(
        seed,
        servers=3,
        workers=3,
        clocks=12,
        consistency=RULES[rule],
        optimizer=ADD,
        gradient=counting,
        options=Options(replicas=1, on_worker_loss=policy),
        faults=FAULTS if policy == "wait" else None,  # others would lose nodes that are well
    )
    calls = run.start_spare()
    run.begin(run.random.random() * 0.02)
    run.network.stop("worker:0")
    run.network.run_for(run.random.uniform(1.5, 4.0))  # it is lost after some 2 s
    stopped = run.workers[0]
    resumes = not run.is_vacant(0) or run.random.random() >= 0.5
    if resumes:
        run.network.resume("worker:0")
        run.network.run_for(run.random.random() * 4 if policy == "wait" else 4)
    is_replaced = run.is_vacant(0)  # by a spare, which "wait" and "replace" call
    if is_replaced:
        run.network.run_until(lambda: bool(calls))
        if resumes:
            run.network.run_until(lambda: stopped.is_removed)
        run.crash("worker:0")
        run.start("worker", 0, run.clock_of(0))
    run.run()
    run.network.run_for(4)
    assert not any(run.workers[number].is_removed for number in range(0 if is_replaced else 1, 3))
    assert policy != "wait" or is_replaced or not stopped.is_removed
    applied = run.values()
    for number in range(3):
        processes = [each for each in run.processes if each.node.number == number]
        accepted = {clock for each in processes for clock in each.accepted}
        pushed = max(each.table.clock for each in processes)
        assert len(accepted) <= applied[number] <= pushed


@pytest.mark.parametrize("policy", ["wait", "replace"])
def test_a_spare_is_called_until_the_call_arrives(policy):
    run = stepping_with_adam(0, options=Options(on_worker_loss=policy))
    calls = run.start_spare()
    run.begin(0.1)
    run.network.partition("scheduler", "spare:0", one_way=True)
    run.crash("worker:0")
    run.network.run_for(1.0)
    assert not calls
    run.network.heal()
    run.network.run_until(lambda: bool(calls))
    run.start("worker", 0, run.clock_of(0))
    run.run()
    check_bits(run, CLOCKS)
    num_calls = len(calls)
    run.network.run_for(1.0)
    assert calls == [0] * num_calls, "the worker has a process"


def test_a_called_spare_that_joins_again_is_called_again():
    state = SchedulerState(1, 2, on_worker_loss="replace")
    state.server_joins(0, "address")
    for worker in range(2):
        state.worker_joins(worker, life=1 + worker)
    state.spare_joins(7)
    assert CallSpare(7, 0) in state.worker_lost(0, "killed", life=1)
    state.spare_lost(7)  # its link broke with the call
    assert state.spare_joins(7) == [CallSpare(7, 0)]
    state.worker_joins(0, life=3)
    assert state.calls() == state.spare_joins(7) == []


@seeds(4, 500)
def test_learning_rates_hold_from_their_clock_on_whichever_server_dies(seed):
    run = stepping_with_adam(seed, servers=3, options=Options(replicas=1, on_worker_loss="wait"))
    for worker in run.workers.values():
        worker.table.push_async = partial(_push_with_rate, worker.table, worker.table.push_async)
    run.begin(run.random.random() * 2)
    run.crash(f"server:{run.random.randrange(3)}", silent=run.random.random() < 0.3)
    run.run()
    for worker in run.workers.values():
        assert torch.equal(worker.pulled[-1], alone(2, CLOCKS, _rate))


def _rate(clock: int) -> float:
    return 1 / (clock + 2)


def _push_with_rate(table: Any, push: Callable[[torch.Tensor], int], grad: torch.Tensor) -> int:
    table.set_lr(_rate(table.clock))
    return push(grad)


@seeds(4, 500)
def test_a_server_that_is_cut_off_confirms_nothing_and_comes_back(seed):
    run = stepping_with_adam(
        seed,
        servers=3,
        options=Options(replicas=1, on_worker_loss="wait"),
    )
    cut = f"server:{run.random.randrange(3)}"
    others = [name for name in run.nodes if name != cut]
    if run.random.random() < 0.5:  # workers still reach it, the scheduler does not
        others = [name for name in others if not name.startswith("worker")]
    run.begin(run.random.random())
    run.network.partition(cut, others)
    run.network.run_for(run.random.random() * 4)
    run.network.heal()
    run.run()
    check_bits(run, CLOCKS)


@seeds(2, 100)
def test_a_server_that_is_believed_lost_but_hears_of_it_joins_again(seed):
    run = stepping_with_adam(
        seed,
        servers=3,
        clocks=12,
        options=Options(replicas=1, on_worker_loss="wait"),
    )
    run.begin(run.random.random())
    scheduler = run.nodes["scheduler"].postoffice
    scheduler.handle(Delivery("server:1", PeerLost("its link was silent")))  # and works again
    assert sorted(scheduler.directory.servers) == [0, 2]
    run.run()
    run.network.run_for(5)
    assert not run.nodes["server:1"].server.is_drained
    assert sorted(scheduler.directory.servers) == [0, 1, 2]
    check_bits(run, 12)


def test_a_server_knows_how_long_it_has_been_cut_off():
    run = stepping_with_adam(
        0,
        servers=3,
        options=Options(replicas=2, on_worker_loss="wait"),
    )
    run.begin(0.0)
    server = run.nodes["server:0"].server
    run.network.partition("server:0", ["scheduler", "worker:0", "worker:1", "server:1"])
    run.network.run_for(20)
    assert server.alone_s == 0  # server 2 reaches it
    run.network.partition("server:0", "server:2")
    run.network.run_for(20)
    assert 15 < server.alone_s < 20
    run.network.heal()
    run.network.run_for(5)
    assert server.alone_s == 0
    run.run()


@seeds(4, 300)
def test_shards_move_to_a_new_server_and_from_one_that_leaves(seed):
    run = stepping_with_adam(
        seed,
        servers=1,
        clocks=12,
        num_tables=4,
        faults=FAULTS if seed % 2 else None,
    )
    run.begin(run.random.random())
    run.start("server", 1)
    run.run()
    run.network.run_for(5)
    directory = run.nodes["scheduler"].postoffice.directory
    assert sorted(directory.loads().values()) == [32, 32]
    assert all(len(chain) == 1 for chain in directory.chains)
    check_bits(run, 12)


@seeds(3, 200)
def test_a_server_that_leaves_gives_its_shards_away_first(seed):
    run = stepping_with_adam(
        seed,
        servers=3,
        clocks=12,
        num_tables=4,
        faults=FAULTS if seed % 2 else None,
    )
    run.begin(run.random.random())
    run.nodes["server:1"].drain()
    run.run()
    run.network.run_for(5)
    directory = run.nodes["scheduler"].postoffice.directory
    assert sorted(directory.servers) == [0, 2]
    assert sorted(directory.loads().values()) == [32, 32]
    check_bits(run, 12)


@seeds(3, 200)
def test_a_scheduler_is_started_again_from_its_journal(seed, tmp_path):
    options = Options(replicas=1, on_worker_loss="wait", journal=tmp_path / "journal")
    run = stepping_with_adam(
        seed,
        servers=3,
        clocks=12,
        options=options,
        faults=FAULTS if seed % 2 else None,
    )
    run.begin(run.random.random())
    epoch = run.nodes["scheduler"].postoffice.epoch
    run.crash("scheduler")
    if seed % 3 == 0:  # nobody makes a new head until the scheduler is back
        run.crash("server:0")
    run.network.run_for(run.random.random() * 3)
    run.start("scheduler", 0)
    run.run()
    run.network.run_for(8)
    directory = run.nodes["scheduler"].postoffice.directory
    assert directory.epoch > epoch
    assert sorted(directory.servers) == ([1, 2] if seed % 3 == 0 else [0, 1, 2])
    check_bits(run, 12)


@seeds(2, 100)
def test_hot_shards_move_to_servers_with_little_load(seed):
    run = stepping_with_adam(
        seed,
        servers=2,
        clocks=60,
        options=Options(rebalance_s=0.05, on_worker_loss="wait"),
        num_tables=4,
        used=4,
        faults=FAULTS if seed % 2 else None,
    )
    assert run.begin(0) is None
    assert run.heads() == [0, 0, 0, 0], "all tables begin on one server"
    run.run()
    if seed % 2 == 0:  # else what is sent again counts as load
        assert sorted(run.heads()) == [0, 0, 1, 1]
    check_bits(run, 60)


@pytest.mark.parametrize("is_vacant", [False, True])
def test_a_worker_waits_for_a_directory_with_its_own_process(is_vacant):
    run = stepping_with_adam(0)
    run.begin(0.5)
    before = run.nodes["scheduler"].postoffice.directory
    if is_vacant:  # a spare was called to replace the lost process
        before = before.with_workers(before.workers, {1: before.lives[1]})
    run.crash("worker:0")
    office = run.start("worker", 0).postoffice
    office.handle(Delivery("scheduler", Here(before)))
    assert office.directory is None, "servers would refuse what it asks"
    run.run()
    check_bits(run, CLOCKS)
