"""Recurrent policies: a state for each environment, which begins at zeros in each episode.

    t          0       1       2   |  0  ...
    env 0   0 -> h0 -> h1 -> h2    | h2 -> h0      the state is carried from unroll to unroll
    env 1   0 -> h0 -> h1 -> 0     | 0 -> h0       the episode ended in step 1

A module with an attribute `state_shape` is recurrent. It maps observations [B, *obs] and states
[B, *state_shape] of one step to outputs, values and the next states. An unroll contains the states
at its beginning, as the actor computed them with its version of the weights.

Source: L. Espeholt et al., ICML 2018, section 5 (an LSTM; its state is sent with the unroll).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from braid.rpc.rl.actions import Outputs, stacked

__all__ = ["Unrolled", "reset", "state_shape_of", "unrolled"]


class Unrolled(NamedTuple):
    """Outputs of a recurrent module for consecutive steps.

    Attributes:
        outputs: Outputs of all steps.
        values: Values, [T, B].
        states: States after each step, [T, B, ...].
    """

    outputs: Outputs
    values: Tensor
    states: Tensor


def state_shape_of(module: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of a recurrent module's state without the batch; None for other modules."""
    shape = getattr(module, "state_shape", None)
    return None if shape is None else tuple(shape)


def reset(states: Tensor, ends: Tensor) -> Tensor:
    """Return states [B, ...] with zeros where the episode has ended, `ends` [B]."""
    return states.masked_fill(ends.view(-1, *[1] * (states.dim() - 1)), 0.0)


def unrolled(module: nn.Module, observations: Tensor, state: Tensor, ends: Tensor) -> Unrolled:
    """Return the outputs of a recurrent module for T + 1 observations.

    Args:
        module: The module.
        observations: Observations, [T + 1, B, ...].
        state: States before the first observation, [B, ...].
        ends: Whether the episode has ended with step t, [T, B].
    """
    outputs, values, states = [], [], []
    for step, observation in enumerate(observations):
        before = state if step == 0 else reset(state, ends[step - 1])
        output, value, state = module(observation, before)
        outputs.append(output)
        values.append(value)
        states.append(state)
    return Unrolled(stacked(outputs), torch.stack(values), torch.stack(states))
