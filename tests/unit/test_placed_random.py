"""Random models on random devices train like one process, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from braid.strategies import placed
from placed_models import (
    NUM_DEVICES,
    OneProcess,
    batch_of,
    is_equal,
    loss_of,
    make_random,
    random_devices,
    same_bits,
)

QUICK = settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])


@QUICK
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(0, 10**6))
def test_random_models_on_random_devices_train_like_one_process(seed, length, where):
    model, example = make_random(seed, length)
    alone = OneProcess(model, lr=0.01, momentum=0.9)
    devices = random_devices(model, example, where)
    with placed.place(model, example, devices=devices, num_cpus=NUM_DEVICES) as program:
        program.optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
        for step in range(2):
            inputs, target = batch_of(seed + step)
            loss = program.step(inputs, target, loss=loss_of)
            assert same_bits(loss, alone.step(inputs, target, loss_of))
            assert program.num_pending == 0
        assert is_equal(program.state_dict(), alone.model)
        outputs = program.eval().predict(batch_of(9)[0])
        for output, other in zip(outputs, alone.model.eval()(*batch_of(9)[0]), strict=True):
            assert same_bits(output, other)


@pytest.mark.parametrize("seed", range(2))
def test_gradients_of_several_steps_are_added_like_in_one_process(seed):
    model, example = make_random(seed, 9)
    alone = OneProcess(model, lr=0.01)
    with placed.place(model, example, num_cpus=NUM_DEVICES) as program:
        for step in range(3):
            inputs, target = batch_of(step)
            program.step(inputs, target, loss=loss_of)
            loss_of(alone.model(*inputs), target).backward()
        grads = program.gradients()
    for name, param in alone.model.named_parameters():
        grad = grads.get(name)
        assert (grad is None) == (param.grad is None)
        assert grad is None or same_bits(grad, param.grad)
