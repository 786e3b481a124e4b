"""Tables on servers train as one process does, and say what is wrong."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from training import said_by

from braid import ps
from braid.comm import Group
from braid.errors import CommError, ConfigError, PeerLostError
from braid.ps.messages import Pull

STEPS, SHAPE = 12, (5, 7)
MAKE = partial(torch.optim.AdamW, lr=0.1)


def gradient(values: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * worker + step)
    return values + torch.randn(values.shape, generator=generator)


def _train(group: Group, servers: int, consistency: ps.Consistency) -> Any:
    with ps.join(group, servers) as node:
        table = node.dense("w", torch.ones(SHAPE), MAKE, consistency)
        if node.is_server:
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
    results = world(servers + workers, _train, servers, ps.BSP)
    assert results[:servers] == [None] * servers
    for clock, values in results[servers:]:
        assert clock == STEPS
        assert torch.equal(values, _alone(workers))


@pytest.mark.parametrize("staleness", [2, math.inf])
def test_stale_values_train_too(world, staleness):
    consistency = ps.Consistency(staleness=staleness)
    for clock, values in world(4, _train, 2, consistency)[2:]:
        assert clock == STEPS
        assert values.abs().mean() < 1


def _mistakes(group: Group) -> list[str]:
    with ps.join(group, 1) as node:
        table = node.dense("w", torch.ones(4), MAKE)
        said = [
            said_by(lambda: node.dense("w", torch.ones(4), MAKE), ConfigError),
            said_by(lambda: node.dense("n", torch.ones(4).int(), MAKE), ConfigError),
        ]
        if node.is_server:
            said.append(said_by(table.pull, ConfigError))
            node.serve()
            return said
        other = node.dense("only here", torch.ones(4), MAKE)
        said += [
            said_by(node.serve, ConfigError),
            said_by(lambda: table.push(torch.ones(3)), ConfigError),
            said_by(lambda: table.push(torch.ones(4).double()), ConfigError),
            said_by(other.pull, CommError),
            said_by(lambda: node.ask_all(lambda _: (Pull("none", 0), ())), CommError),
        ]
        table.push(torch.ones(4))
        assert table.pull().sum() != 4, "the server lives on"
        return said


def test_mistakes_are_named_and_the_server_lives_on(world):
    server, worker = world(2, _mistakes)
    assert "server 0 has the tables: only workers pull and push" in server[2]
    twice, dtype, role, shape, precision, unknown, none = worker
    assert "there is a table 'w' already" in twice
    assert "needs floating-point values" in dtype
    assert "rank is worker 0, not a server" in role
    assert "table 'w' has torch.float32[4], got a gradient of torch.float32[3]" in shape
    assert "torch.float64[4]" in precision
    assert "there is no table 'only here'; the server has w" in unknown
    assert "there is no table 'none'" in none


def _lost(group: Group) -> str:
    node = ps.join(group, 1)
    table = node.dense("w", torch.ones(4), MAKE)
    try:
        if node.is_server:
            node.serve()
        elif node.number == 0:
            table.push(torch.ones(4))
            table.pull()
        else:
            msg = "no data"
            raise KeyError(msg)
    except (PeerLostError, KeyError) as exc:
        node.__exit__(type(exc), exc, None)
        return str(exc)
    return "no error"


def test_a_lost_worker_is_named_with_who_waits_for_it(world):
    server, waits, _ = world(3, _lost)
    assert server.startswith("lost worker 1: ")
    assert "lost server:0" in waits


def _roles(group: Group) -> list[str]:
    return [
        said_by(lambda: ps.join(group), ConfigError),
        said_by(lambda: ps.join(group, 1), ConfigError),
    ]


def test_roles_are_checked(world, monkeypatch):
    monkeypatch.delenv("BRAID_SERVERS", raising=False)
    ((none, all_servers),) = world(1, _roles)
    assert "how many ranks are servers? Pass servers=" in none
    assert "of 1 ranks 1 cannot be servers" in all_servers


@pytest.mark.launcher
@pytest.mark.proof
def test_the_example_learns_digits_on_two_servers_and_two_workers(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "ps_logistic.py"
    command = [sys.executable, "-m", "braid", "run", "--servers", "2", "--workers", "2"]
    done = subprocess.run(
        [*command, "--log-dir", str(tmp_path / "run"), str(example)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        assert f"worker {worker}: 95.6% right, as one process: True" in done.stdout
