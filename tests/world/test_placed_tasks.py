"""Placed models over several tasks: nodes of remote calls in threads, and processes that are killed."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from braid.errors import CommTimeout, ConfigError, MismatchError, StaleError
from braid.parallel.graph import capture
from braid.rpc.agent import Agent
from braid.rpc.current import acting_for
from braid.strategies import placed
from braid.strategies.placed.rendezvous_state import RendezvousKey
from braid.strategies.placed.worker import PlacedWorker, receive_placed, serve_placed
from placed_models import (
    OneProcess,
    batch_of,
    is_equal,
    loss_of,
    make_random,
    random_devices,
    same_bits,
)
from rpc_nodes import first_of

ALLOWED = {"allowed_modules": ["placed_models", "test_placed_tasks"]}
HELD = threading.Event()


def net(seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose middle layer may fail or wait, and an example."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), Failing(), nn.Linear(8, 4))
    return model, torch.randn(6, 8)


class Failing(nn.Module):
    def forward(self, x):
        if x.abs().max() > 1e6:
            raise ZeroDivisionError("too large")
        if x.abs().max() < 1e-6:
            HELD.wait(20)
        return x * 1


def unequal() -> tuple[nn.Module, torch.Tensor]:
    """Return another model in each call."""
    count = len(MADE)
    MADE.append(count)
    return nn.Sequential(nn.Linear(8, 8 + count), nn.Linear(8 + count, 2)), torch.randn(6, 8)


MADE: list[int] = []
BATCH = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
TARGET = torch.tensor([0, 1, 2, 3, 0, 1])
SPREAD = {"0": "/job:w0", "1": "/job:w1", "2": "/job:w0"}


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(0, 10**6))
def test_random_models_over_tasks_train_like_one_process(seed, length, where):
    model, example = make_random(seed, length)
    alone = OneProcess(model, lr=0.01, momentum=0.9)
    names = {"0": "/job:w0", "1": "/job:w1/device:cpu:0", "2": "/job:w1/device:cpu:1"}
    chosen = random_devices(capture(model, *example), where)
    devices = {label: names[device[-1]] for label, device in chosen.items()}
    with (
        first_of(2, **ALLOWED),
        placed.place(make_random, args=(seed, length), devices=devices, num_cpus=2) as program,
    ):
        program.optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
        for step in range(2):
            inputs, target = batch_of(seed + step)
            loss = program.step(inputs, target, loss=loss_of)
            assert same_bits(loss, alone.step(inputs, target, loss_of))
            assert program.num_pending == 0
        assert is_equal(program.state_dict(), alone.model)
        assert same_bits(
            program.eval().predict(batch_of(9)[0])[0], alone.model.eval()(*batch_of(9)[0])[0]
        )


def test_an_exception_of_another_task_names_node_line_device_and_step():
    with first_of(2, **ALLOWED), placed.place(net, devices=SPREAD) as program:
        program.optimizer(torch.optim.SGD, lr=0.1)
        program.step(BATCH, TARGET, loss=functional.cross_entropy)
        before = program.state_dict()
        with pytest.raises(ZeroDivisionError) as caught:
            program.step(BATCH * 1e9, TARGET, loss=functional.cross_entropy)
        text = r"too large \(in step 2: 1 at .*, on /job:w1/task:0/device:cpu:0\)"
        assert re.search(text, str(caught.value))
        assert program.num_pending == 0
        assert all(torch.equal(x, before[key]) for key, x in program.state_dict().items())
        program.step(BATCH, TARGET, loss=functional.cross_entropy)


def test_a_step_that_takes_too_long_ends_everywhere():
    HELD.clear()
    with first_of(2, **ALLOWED):
        with placed.place(net, devices=SPREAD, timeout_s=0.5) as program:
            state = {key: torch.zeros_like(x) for key, x in program.state_dict().items()}
            program.load_state_dict(state)
            with pytest.raises(CommTimeout, match=r"did not run step 1 within 0\.5 s"):
                program.step(BATCH, TARGET, loss=functional.cross_entropy)
            HELD.set()
        assert program._tasks.worker.rendezvous.num_pending == 0


def test_a_worker_of_another_incarnation_refuses_steps_and_keys_until_it_is_restored():
    with first_of(2, **ALLOWED) as agents, placed.place(net, devices=SPREAD) as program:
        program.optimizer(torch.optim.SGD, lr=0.1)
        program.step(BATCH, TARGET, loss=functional.cross_entropy)
        state = program.state_dict()
        loss = program.step(BATCH, TARGET, loss=functional.cross_entropy)
        old = restarted(agents[1])
        key = RendezvousKey("/job:w1/task:0", old.incarnation, "/job:w0", "value 2", "g", 9)
        with (
            acting_for(agents[1]),
            pytest.raises(StaleError, match="was requested from its process"),
        ):
            receive_placed(key).wait()
        with pytest.raises(StaleError, match=r"w1 has restarted .* call placed.restore\(state\)"):
            program.step(BATCH, TARGET, loss=functional.cross_entropy)
        program.restore(state)
        assert torch.equal(program.step(BATCH, TARGET, loss=functional.cross_entropy), loss)


def restarted(agent: Agent) -> PlacedWorker:
    """Replace the worker of a node by a new one, as in a new process; return the old one."""
    old = agent.part(PlacedWorker)
    agent._parts[PlacedWorker] = PlacedWorker()
    return old


def test_a_task_that_makes_another_model_is_refused():
    MADE.clear()
    with (
        first_of(2, **ALLOWED),
        pytest.raises(MismatchError, match="unequal made a different model"),
    ):
        placed.place(unequal, devices={"0": "/job:w0", "1": "/job:w1"})


def test_a_model_without_a_function_is_refused_for_other_tasks():
    with first_of(2, **ALLOWED), pytest.raises(ConfigError, match="pass a function that returns"):
        placed.place(net()[0], BATCH, devices=SPREAD)


def test_a_loss_that_tasks_cannot_find_by_name_is_refused():
    with (
        first_of(2, **ALLOWED),
        placed.place(net, devices={**SPREAD, "2": "/job:w1"}) as program,
        pytest.raises(ConfigError, match="cannot be called by name"),
    ):
        program.step(BATCH, TARGET, loss=lambda y, t: functional.cross_entropy(y, t) * 2)


def test_peers_may_call_the_methods_for_masters_only():
    with first_of(1, **ALLOWED), pytest.raises(ConfigError, match="no method '_hosted'"):
        serve_placed("", "_hosted", ("x",))
