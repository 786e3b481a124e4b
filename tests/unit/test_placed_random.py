"""Random models on random devices train like one process, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from braid.comm.autograd.nested import tensors_in
from braid.errors import ConfigError
from braid.parallel.graph import capture
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
from plain_models import MODELS

QUICK = settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])


@QUICK
@given(st.integers(0, 10**6), st.integers(1, 14), st.integers(0, 10**6))
def test_random_models_on_random_devices_train_like_one_process(seed, length, where):
    model, example = make_random(seed, length)
    alone = OneProcess(model, lr=0.01, momentum=0.9)
    devices = random_devices(capture(model, *example), where)
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


def squares(output, target):
    return sum(x.float().square().mean() for x in tensors_in(output)) * target


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"lstm"}))
def test_models_of_many_kinds_do_not_depend_on_the_placement(name):
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model, example = make(), batch(4)
    devices = random_devices(capture(model, **example), 0)
    with (
        placed.place(copy.deepcopy(model), example) as alone,
        placed.place(model, example, devices=devices, num_cpus=NUM_DEVICES) as spread,
    ):
        inputs = batch(5)
        for each in (alone, spread):
            each.optimizer(torch.optim.SGD, lr=0.01)
        for _ in range(2):
            losses = [each.step(inputs, 2.0, loss=squares) for each in (alone, spread)]
            assert same_bits(*losses)
        states = [each.state_dict() for each in (alone, spread)]
        assert all(same_bits(x, states[1][key]) for key, x in states[0].items())


def test_dropout_inside_of_a_kernel_is_refused_on_several_devices():
    make, batch = MODELS["lstm"]
    model, example = make(), batch(4)
    devices = random_devices(capture(model, **example), 0)
    with placed.place(model, example, devices=devices, num_cpus=NUM_DEVICES) as spread:
        assert len(set(spread.devices.values())) > 1
        with pytest.raises(ConfigError, match="draws random numbers that would depend"):
            spread.step(batch(5), 2.0, loss=squares)
