"""Hooks that tell a reducer what autograd does, and keep nothing alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from braid.parallel.gradients import ParamTable
from braid.parallel.gradients.gradient_hooks import ForwardPass, GradientHooks

FORWARD = ForwardPass(3.0, 7)


class Listener:
    """Writes down what it is told; doubles each part of a gradient."""

    def __init__(self, net):
        self.told = []
        self.parts = []
        records = ParamTable.of(net).records
        self.hooks = GradientHooks(records, self)

    def on_output(self, forward):
        self.told.append(forward)

    def on_partial_grad(self, position, grad):
        self.told.append("part")
        self.parts.append(position)
        return 2 * grad

    def on_gradient(self, position):
        self.told.append(position)


@pytest.fixture
def net():
    with torch.random.fork_rng():
        return nn.Linear(2, 1)  # weight and bias


def backward(net, listener):
    listener.told.clear()
    net.zero_grad()
    found = net(torch.ones(1, 2))
    assert listener.hooks.register_outputs([net.bias, found], FORWARD)
    found.sum().backward()
    return listener.told


def test_outputs_come_before_gradients_of_those_that_are_listened_to(net):
    listener = Listener(net)
    listener.hooks.attach([1])
    assert backward(net, listener) == [FORWARD, 1]
    listener.hooks.attach([0, 1])
    assert sorted(backward(net, listener)[1:]) == [0, 1]
    listener.hooks.close()
    assert backward(net, listener) == [FORWARD]


def test_parts_can_be_changed_and_come_before_their_gradient(net):
    listener = Listener(net)
    listener.hooks.attach([1])
    listener.hooks.register_partial_grad_hooks()
    listener.hooks.register_partial_grad_hooks()
    assert backward(net, listener)[1:] == ["part", 1]
    assert net.bias.grad == 2
    assert bool((net.weight.grad == 1).all())


def test_what_is_frozen_while_weighing_begins_is_weighed_later(net):
    listener = Listener(net)
    listener.hooks.attach([0, 1])
    net.bias.requires_grad_(False)
    listener.hooks.register_partial_grad_hooks()
    net.bias.requires_grad_(True)
    listener.hooks.refresh()
    assert backward(net, listener).count("part") == 2
    assert sorted(listener.parts) == [0, 1]


def test_weighing_that_began_with_nothing_is_not_forgotten(net):
    listener = Listener(net)
    net.requires_grad_(False)
    listener.hooks.register_partial_grad_hooks()
    net.requires_grad_(True)
    listener.hooks.attach([1])
    assert backward(net, listener)[1:] == ["part", 1]


def test_a_parameter_that_is_returned_is_not_watched(net):
    listener = Listener(net)
    assert not listener.hooks.register_outputs([net.bias], FORWARD)
    net.bias.sum().backward()
    assert listener.told == []


def test_hooks_keep_nobody_alive_and_go_with_their_owner(net):
    listener = Listener(net)
    listener.hooks.attach([0, 1])
    listener.hooks.register_partial_grad_hooks()
    gone = weakref.ref(listener)
    found = net(torch.ones(1, 2))
    listener.hooks.register_outputs([found], FORWARD)
    gc.disable()
    try:
        del listener
        assert gone() is None
    finally:
        gc.enable()
    assert not net.bias._post_accumulate_grad_hooks
    assert not net.bias._backward_hooks
    found.sum().backward()  # nobody hears of it
    assert net.bias.grad == 1
