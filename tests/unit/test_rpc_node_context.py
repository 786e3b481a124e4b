"""A context on one node, and the local backwards that run in it."""

from __future__ import annotations

import torch

from braid.rpc.autograd.graph import Receive
from braid.rpc.autograd.node_context import Context
from braid.rpc.protocol.reference_messages import Id

FAILED, NEXT, EDGE = Id(0, 1), Id(0, 2), 11


def test_a_failed_backward_that_comes_late_leaves_the_next_one_its_gradients():
    context = Context(0, 7)
    receive = context.receives[EDGE] = Receive(EDGE, 1)
    param = torch.ones(1, requires_grad=True)
    context.begin([param.sum()])
    context.state.begin(FAILED)
    context.state.fail("a deadline", FAILED)
    context.state.begin(NEXT)
    with context.local(NEXT, 1.0):  # one of two local backwards
        context.gradients[param] = torch.ones(1)
        receive.add([torch.ones(1)])
    with context.local(FAILED, 1.0):
        pass
    with context.local(NEXT, 1.0):
        receive.add([torch.ones(1)])
    context.state.fail("another deadline", NEXT)
    context.restore()
    assert (receive.take(), context.gradients) == ([torch.full((1,), 2.0)], {})
