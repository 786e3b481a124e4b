"""Random models on random devices train like one process, bit for bit."""

from __future__ import annotations

import random

import networkx as nx
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import braid
from braid.strategies import placed
from braid.strategies.placed.constraints import colocations_of
from placed_models import OneProcess, batch_of, is_equal, loss_of, make_random

NUM_DEVICES = 3
QUICK = settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])


def random_devices(
    model: nn.Module, example: tuple[torch.Tensor, ...], seed: int
) -> dict[str, str]:
    """Return a random device for each group of nodes that must have one device."""
    graph = braid.capture(model, *example)
    draw, labels = random.Random(seed), graph.labels()
    together = nx.Graph([(first, second) for first, second, _ in colocations_of(graph)])
    together.add_nodes_from(range(len(labels)))
    devices = {}
    for group in sorted(map(sorted, nx.connected_components(together))):
        device = f"/device:cpu:{draw.randrange(NUM_DEVICES)}"
        devices |= {labels[position]: device for position in group}
    return devices


@QUICK
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(0, 10**6))
def test_random_models_on_random_devices_train_like_one_process(seed, length, where):
    model, example = make_random(seed, length)
    alone = OneProcess(model, lr=0.1, momentum=0.9)
    devices = random_devices(model, example, where)
    with placed.place(model, example, devices=devices, num_cpus=NUM_DEVICES) as program:
        program.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        for step in range(2):
            inputs, target = batch_of(seed + step)
            loss = program.step(inputs, target, loss=loss_of)
            assert torch.equal(loss, alone.step(inputs, target, loss_of))
            assert program.num_pending == 0
        assert is_equal(program.state_dict(), alone.model)
        outputs = program.eval().predict(batch_of(9)[0])
        for output, other in zip(outputs, alone.model.eval()(*batch_of(9)[0]), strict=True):
            assert torch.equal(output, other)


@pytest.mark.parametrize("seed", range(2))
def test_gradients_of_several_steps_are_added_like_in_one_process(seed):
    model, example = make_random(seed, 9)
    alone = OneProcess(model, lr=0.1)
    with placed.place(model, example, num_cpus=NUM_DEVICES) as program:
        for step in range(3):
            inputs, target = batch_of(step)
            program.step(inputs, target, loss=loss_of)
            loss_of(alone.model(*inputs), target).backward()
        grads = program.gradients()
    for name, param in alone.model.named_parameters():
        grad = grads.get(name)
        assert (grad is None) == (param.grad is None)
        assert grad is None or torch.equal(grad, param.grad)
