"""Parameters whose hooks local backwards of contexts call."""

from __future__ import annotations

import torch
from torch import nn

from braid.rpc.autograd.accumulation import hook_groups, run_hooks
from braid.runtime.torch_internals import accumulate_hooks


def test_parameters_that_are_wrapped_again_follow_the_last_wrapper():
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    run_hooks(params, is_early=True)
    run_hooks(params)
    assert [group.is_early for group in hook_groups(params)] == [False]


def test_a_group_of_a_replaced_layer_leaves_the_parameters_that_stay():
    kept, replaced = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    run_hooks([kept, replaced], is_early=True)
    del replaced
    new = nn.Parameter(torch.ones(1))
    run_hooks([kept, new])
    (hook,) = (accumulate_hooks(kept) or {}).values()
    (group,) = hook_groups([kept])
    assert hook is group
    assert ([ref() for ref in group.members], group.is_early) == ([kept, new], False)
