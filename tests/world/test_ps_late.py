"""Nodes join a job that runs already: a server gets shards, a worker goes on where another ended."""

from __future__ import annotations

import itertools
import os
from functools import partial
from typing import Any

import pytest
import torch
from training import said_by

from braid import ps
from braid.comm import Group
from braid.errors import ConfigError, PeerLostError, RendezvousError
from braid.ps import postoffice
from braid.runtime.transport import Loss
from braid.runtime.wire import Secret, local_address

ADD = partial(torch.optim.SGD, lr=1.0)
SUM = ps.Consistency(aggregate="sum")
SERVERS, WORKERS, LATE = 1, 2, 4  # rank 4 is the server that comes later
COUNTS = SERVERS, WORKERS
STEPS = 6


class Job:
    """Nodes of one job, made one by one: no collective connects them."""

    def __init__(self, group: Group, policy: ps.Options) -> None:
        self.options = policy
        self.secret = Secret(group.objects.broadcast(os.urandom(32)))
        self.run_id = group.objects.broadcast(os.urandom(4).hex())
        self.address = ""
        node = self.node("scheduler", 0) if group.rank == 0 else None
        self.address = group.objects.broadcast(node.address if node else "")
        self.first = node or self.node(*self.role(group.rank))

    @staticmethod
    def role(rank: int) -> tuple[Any, int]:
        return {1: ("server", 0), LATE: ("server", 1)}.get(rank, ("worker", rank - 2))

    def node(self, role: Any, number: int) -> ps.Node:
        return ps.join_running(
            self.address, self.secret, self.run_id, role, number, COUNTS, options=self.options
        )


def _tables(node: ps.Node) -> tuple[ps.DenseTable, ps.DenseTable]:
    first = node.dense("a", torch.zeros(600_000), ADD, SUM)  # of three shards
    return first, node.dense("b", torch.zeros(4), ADD, SUM)


def _grows_and_is_repaired(group: Group) -> Any:
    job = Job(group, ps.Options(on_worker_loss="wait"))
    node = job.first
    tables = _tables(node)
    together = group.split(int(group.rank > 1))
    if group.rank == LATE:
        together.barrier()  # the directory is there
    if not node.is_worker:
        with node:
            node.serve()
            return node.postoffice.directory.epoch if node.server else 0
    seen = []

    def step(node: ps.Node, tables: Any, size: float = 1.0) -> None:
        seen.append([table.pull()[0].item() for table in tables])
        for table in tables:
            table.wait(table.push(torch.full_like(table.pull(), -size)))

    tables[0].pull()
    together.barrier()
    if node.number == 0:
        with node:
            for _ in range(STEPS):
                step(node, tables)
            node.postoffice.wait_until(lambda: node.postoffice.directory.heads()[1] > 20, 20.0)
            return [table.pull()[0].item() for table in tables], seen
    for _ in range(2):
        step(node, tables)
    tables[0].push(torch.full([600_000], -1.0))
    assert tables[0].pull()[0] == 6  # applied there, and of table "b" nothing was pushed
    node.__exit__(KeyError, None, None)
    again = job.node("worker", 1)
    tables = _tables(again)
    with again:
        begin = again.resume()
        for number in range(begin, STEPS):
            step(again, tables, 100.0 if number == begin else 1.0)
        return begin, tables[1].clock, seen[3:]


def test_a_server_that_comes_later_gets_shards_and_a_new_worker_goes_on_where_the_old_one_ended(
    world,
):
    scheduler, server, steady, renewed, late = world(5, _grows_and_is_repaired)
    assert scheduler == 0
    assert server > 0
    assert late > 0
    # the second push of clock 2 to table "a" was accepted, and not applied; that to "b" was
    assert steady[0] == [12.0, 12.0 + 99.0]
    assert renewed[:2] == (2, STEPS)
    assert renewed[2][0] == [6.0, 105.0]


def _has_another_model(group: Group) -> Any:
    job = Job(group, ps.Options(on_worker_loss="wait"))
    node = job.first
    if group.rank == LATE:
        node.close()
        return None
    table = _tables(node)[1]
    if not node.is_worker:
        with node:
            node.serve()
            return None
    if node.number == 0:
        with node:
            for _ in range(2):
                table.push(-torch.ones(4))
            return table.pull().tolist()
    table.wait(table.push(-torch.ones(4)))
    node.__exit__(KeyError, None, None)
    other = job.node("worker", 1)
    other.dense("b", torch.zeros(5), ADD, SUM)
    said = said_by(other.resume, PeerLostError)
    other.__exit__(KeyError, None, None)
    again = job.node("worker", 1)
    table = _tables(again)[1]
    with again:
        table.clock = table.fetch_clock()
        table.push(-torch.ones(4))
        return said, table.pull().tolist()


def test_a_worker_with_another_model_that_comes_later_is_refused_and_the_run_goes_on(world):
    _, _, steady, renewed, _ = world(5, _has_another_model)
    assert steady == [4.0] * 4
    assert renewed[1] == [4.0] * 4
    assert "table 'b' differs: " in renewed[0]
    assert "worker:1 has torch.float32[5]" in renewed[0]


def _refused(group: Group) -> Any:
    job = Job(group, ps.Options(on_worker_loss="shrink"))
    node = job.first
    tables = _tables(node)
    if group.rank == LATE:
        node.close()
        return None
    if not node.is_worker:
        with node:
            node.serve()
            return said_by(node.resume, ConfigError)
    if node.number == 1:
        tables[1].pull()
        node.__exit__(KeyError, None, None)
        return None
    tables[1].push(torch.ones(4))
    tables[1].pull()  # once worker 1 is gone
    with node:
        return said_by(lambda: ps.join_running("", *_wrong(), "worker", 1, COUNTS), ConfigError)


def _wrong() -> tuple[Secret, str]:
    return Secret(b"x" * 32), "run"


def test_nodes_without_an_address_or_a_table_are_refused(world):
    scheduler, server, worker, _, _ = world(5, _refused)
    assert "only workers with tables can resume" in scheduler
    assert "only workers with tables can resume" in server
    assert "for all but the scheduler its address" in worker


def _serves_after_the_run(group: Group) -> str:
    with ps.join(group, servers=1) as node:
        office = node.postoffice
        if node.role == "scheduler":
            office.wait_until(lambda: office.directory is not None)
        else:
            office.join()
        group.barrier()
        if node.role == "server":
            group.context.health.report(Loss(0, "has ended", departed=True))
            node.serve()  # it would wait 300 s for a network that is back
        else:
            office.close(0.0)  # as if the network were cut: nobody has left
        node.close()
    return node.role


def test_a_server_that_was_cut_off_ends_when_the_launcher_says_that_the_run_has(world):
    assert world(3, _serves_after_the_run) == ["scheduler", "server", "worker"]


@pytest.mark.parametrize("ends_while_it_connects", [False, True])
def test_a_server_that_comes_after_the_run_ends(monkeypatch, ends_while_it_connects):
    monkeypatch.setattr(postoffice, "JOIN_S", 0.1)
    answers = itertools.chain([not ends_while_it_connects], itertools.repeat(True))
    nobody = local_address("ps-nobody")
    with ps.join_running(
        nobody, *_wrong(), "server", 1, COUNTS, has_ended=lambda: next(answers)
    ) as node:
        node.serve()


def test_a_server_that_cannot_reach_the_scheduler_fails_while_the_run_goes_on(monkeypatch):
    monkeypatch.setattr(postoffice, "JOIN_S", 0.1)
    node = ps.join_running(local_address("ps-nobody"), *_wrong(), "server", 1, COUNTS)
    with pytest.raises(RendezvousError, match="no braid process answered"), node:
        node.serve()
