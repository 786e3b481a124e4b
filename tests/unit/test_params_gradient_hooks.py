"""Hooks that tell a reducer what autograd does, and keep nothing alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from braid.params import ParamTable
from braid.params.gradient_hooks import Forward, GradientHooks

FORWARD = Forward(3.0, 7)


class Listener:
    """Writes down what it is told; doubles each part of a gradient."""

    def __init__(self, net):
        self.told = []
        self.parts = []
        records = ParamTable.of(net).records
        self.hooks = GradientHooks(
            records, on_output=self.output, on_part=self.part, on_gradient=self.gradient
        )

    def output(self, forward):
        self.told.append(forward)

    def part(self, position, grad):
        self.told.append("part")
        self.parts.append(position)
        return 2 * grad

    def gradient(self, position):
        self.told.append(position)


@pytest.fixture
def net():
    with torch.random.fork_rng():
        return nn.Linear(2, 1)  # weight and bias


def backward(net, listener):
    listener.told.clear()
    net.zero_grad()
    found = net(torch.ones(1, 2))
    assert listener.hooks.watch([net.bias, found], FORWARD)
    found.sum().backward()
    return listener.told


def test_outputs_come_before_gradients_of_those_that_are_listened_to(net):
    listener = Listener(net)
    listener.hooks.place([1])
    assert backward(net, listener) == [FORWARD, 1]
    listener.hooks.place([0, 1])
    assert sorted(backward(net, listener)[1:]) == [0, 1]
    listener.hooks.close()
    assert backward(net, listener) == [FORWARD]


def test_parts_can_be_changed_and_come_before_their_gradient(net):
    listener = Listener(net)
    listener.hooks.place([1])
    listener.hooks.weigh()
    listener.hooks.weigh()
    assert backward(net, listener)[1:] == ["part", 1]
    assert net.bias.grad == 2
    assert bool((net.weight.grad == 1).all())


def test_what_is_frozen_while_weighing_begins_is_weighed_later(net):
    listener = Listener(net)
    listener.hooks.place([0, 1])
    net.bias.requires_grad_(False)
    listener.hooks.weigh()
    net.bias.requires_grad_(True)
    listener.hooks.follow()
    assert backward(net, listener).count("part") == 2
    assert sorted(listener.parts) == [0, 1]


def test_weighing_that_began_with_nothing_is_not_forgotten(net):
    listener = Listener(net)
    net.requires_grad_(False)
    listener.hooks.weigh()
    net.requires_grad_(True)
    listener.hooks.place([1])
    assert backward(net, listener)[1:] == ["part", 1]


def test_a_parameter_that_is_returned_is_not_watched(net):
    listener = Listener(net)
    assert not listener.hooks.watch([net.bias], FORWARD)
    net.bias.sum().backward()
    assert listener.told == []


def test_hooks_keep_nobody_alive_and_go_with_their_owner(net):
    listener = Listener(net)
    listener.hooks.place([0, 1])
    listener.hooks.weigh()
    gone = weakref.ref(listener)
    found = net(torch.ones(1, 2))
    listener.hooks.watch([found], FORWARD)
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
