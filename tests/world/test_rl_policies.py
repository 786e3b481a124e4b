"""Policies with continuous actions and with a state, and learners that average gradients."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from rl_worlds import Corridor, Net
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.rpc import rl
from braid.rpc.rl.averaging import GradientAverage
from braid.rpc.rl.losses import impala_loss, join_unrolls

OPTIONS = rl.LossOptions(discount=0.9, entropy_cost=0.003)


class Target:
    """The reward of an action is higher the nearer it is to the observed place."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.place = self.random.uniform(-1, 1, 2)
        return self.place, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert isinstance(action, np.ndarray)
        reward = -float(np.square(action - self.place).sum())
        return self.reset()[0], reward, True, False, {}


class Pointer(nn.Module):
    """A Gaussian policy with one standard deviation for all observations."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.value = nn.Linear(2, 2), nn.Linear(2, 1)
        self.log_std = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        return rl.Gaussian(self.mean(x), self.log_std), self.value(x).squeeze(-1)


class Cue:
    """The first observation is 1 or -1, the next ones are 0; the last action must be the sign."""

    LENGTH = 3

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.sign, self.steps = int(self.random.integers(2)), 0
        return np.array([2.0 * self.sign - 1]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        ended = self.steps == self.LENGTH
        return np.zeros(1), float(ended and action == self.sign), ended, False, {}


class Memory(nn.Module):
    """A recurrent policy for any observation."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(inputs, 8), nn.Linear(8, 3)
        self.state_shape = (8,)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        state = self.cell(x, state)
        outputs = self.head(state)
        return outputs[..., :2], outputs[..., 2], state


def seeded(make: Any, *args: Any) -> Any:
    torch.manual_seed(1)
    return make(*args)


def learner_of(net: nn.Module, group: Group | None = None, lr: float = 0.02, **options: Any) -> Any:
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    return rl.ImpalaLearner(net, optimizer, OPTIONS, group=group, **options)


def returns_of(net: nn.Module, environments: list[Any], length: int, updates: int) -> list[float]:
    """Learn with one actor in this process; return the returns of the episodes."""
    learner = learner_of(net)
    learner.join("here")
    policy = rl.LocalPolicy(copy.deepcopy(net), 0)
    actor = rl.Actor(environments, policy, unroll_length=length, seed=0)
    returns: list[float] = []
    for _ in range(updates):
        policy.load(learner.weights())
        unroll = actor.unroll()
        returns += unroll.returns
        learner.add(unroll)
        learner.step()
    return returns


def test_a_gaussian_policy_learns_continuous_actions():
    """At the start the mean reward is below -2, the variance of the actions alone."""
    returns = returns_of(seeded(Pointer), [Target() for _ in range(32)], 4, 150)
    assert np.mean(returns[:256]) < -2
    assert np.mean(returns[-256:]) > -0.5


def test_a_recurrent_policy_remembers_what_others_cannot():
    """Without a memory, half of the last actions are right."""
    returns = returns_of(seeded(Memory, 1), [Cue() for _ in range(16)], 5, 150)
    assert np.mean(returns[-200:]) > 0.9


def test_states_are_carried_through_unrolls_and_reset_at_the_ends_of_episodes():
    net = seeded(Memory, 5)
    worlds = [Corridor(), Corridor(limit=3), Corridor(limit=4)]
    actor = rl.Actor(worlds, rl.LocalPolicy(net, 0), unroll_length=4, seed=0)
    unrolls = [actor.unroll() for _ in range(4)]
    assert unrolls[0].state.count_nonzero() == 0
    assert [unroll.state[2].any().item() for unroll in unrolls[1:]] == [False] * 3, "ended there"
    assert [unroll.state[1].any().item() for unroll in unrolls[1:]] == [True, True, False]
    state = torch.zeros(3, 8)
    values, last_values = [], []
    for unroll in unrolls:
        assert torch.equal(unroll.state, state)
        last: list[tuple[int, torch.Tensor]] = []
        for step in range(4):
            with torch.no_grad():
                outputs, value, state = net(unroll.observations[step], state)
            chosen = outputs.log_softmax(-1).gather(-1, unroll.actions[step].unsqueeze(-1))
            assert torch.equal(chosen.squeeze(-1), unroll.log_probs[step])
            values.append(value)
            last += [(n, state[n]) for n in range(3) if unroll.truncated[step, n]]
            state = state * ~(unroll.terminated | unroll.truncated)[step].unsqueeze(-1)
        before = torch.zeros(0, 8)
        if last:  # in the order of the environments
            before = torch.stack([kept for _, kept in sorted(last, key=lambda pair: pair[0])])
        with torch.no_grad():
            last_values.append(net(unroll.last_observations, before)[1])
    seen: list[Any] = []

    def vtrace(log_rhos: torch.Tensor, steps: rl.Steps, **options: Any) -> rl.VTrace:
        seen.append((log_rhos, steps))
        return rl.vtrace(log_rhos, steps, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("braid.rpc.rl.losses.vtrace", vtrace)
        for unroll in unrolls:
            impala_loss(net, unroll, OPTIONS).backward()
    torch.testing.assert_close(torch.cat([steps.values for _, steps in seen]), torch.stack(values))
    for (log_rhos, steps), unroll, last in zip(seen, unrolls, last_values, strict=True):
        torch.testing.assert_close(log_rhos, torch.zeros(4, 3))
        torch.testing.assert_close(steps.next_values.T[unroll.truncated.T], last)
    parts = torch.stack([impala_loss(net, unroll, OPTIONS) for unroll in unrolls])
    torch.testing.assert_close(impala_loss(net, join_unrolls(unrolls), OPTIONS), parts.mean())


def test_recurrent_and_other_policies_are_not_mixed():
    net = seeded(Memory, 5)
    with pytest.raises(ConfigError, match=r"Memory has state_shape=\(8,\), but the state is miss"):
        rl.LocalPolicy(net, 0).decide(torch.zeros(1, 5))
    with pytest.raises(ConfigError, match="a served policy has no states"):
        rl.PolicyServer(net, max_size=1)
    unrolls = [
        rl.Actor([Corridor()], rl.LocalPolicy(one, 0), unroll_length=2, seed=0).unroll()
        for one in (net, seeded(Net))
    ]
    with pytest.raises(ConfigError, match="1 of 2 unrolls have a state"):
        join_unrolls(unrolls)


# -- several learners

SIZES = (2, 3)  # environments of each learner's actor


def unrolls_of(net: nn.Module, rank: int) -> list[rl.Unroll]:
    worlds = [Corridor() for _ in range(SIZES[rank])]
    actor = rl.Actor(worlds, rl.LocalPolicy(net, rank), unroll_length=6, seed=rank)
    return [actor.unroll() for _ in range(4)]


def learn(group: Group, nets: list[nn.Module], unrolls: list[list[rl.Unroll]]) -> Any:
    """Learn on one rank of two; rank 0 ends after three updates, and rank 1 never."""
    learner = learner_of(nets[group.rank], group)
    learner.join("here")
    for unroll in unrolls[group.rank]:
        if group.rank == 0 and learner.statistics.version == 3:
            break
        learner.add(unroll)
        learner.step()
    was_over = learner.is_over
    learner.stop()
    return was_over, learner.statistics.version, nets[group.rank].state_dict()


def test_two_learners_train_as_one_with_the_joined_batch(world):
    nets = [seeded(Net).double(), Net().double()]
    unrolls = [
        [u._replace(**{k: v.double() for k, v in u._asdict().items() if is_real(v)}) for u in each]
        for each in (unrolls_of(seeded(Net), rank) for rank in range(2))
    ]
    one = copy.deepcopy(nets[0])
    alone = learner_of(one, batch_size=2)
    alone.join("here")
    for pair in list(zip(*unrolls, strict=True))[:3]:
        for unroll in pair:
            alone.add(unroll)
        alone.step()
    first, second = world(2, learn, nets, unrolls)
    assert (first[:2], second[:2]) == ((False, 3), (True, 3)), "the end of one ends the other"
    for name, value in one.state_dict().items():
        assert torch.equal(first[2][name], second[2][name])
        # double: sums of at most 30 steps in another order, and three steps of Adam
        torch.testing.assert_close(first[2][name], value, rtol=1e-9, atol=1e-12)


def step(group: Group, nets: list[nn.ParameterDict], grads: list[dict[str, float]]) -> Any:
    """Step once with the mean of the gradients of two learners with 1 and 3 steps."""
    net = nets[group.rank]
    average = GradientAverage(group, net)
    for name, grad in grads[group.rank].items():
        net[name].grad = torch.full_like(net[name], grad)
    assert average.average((1, 3)[group.rank])
    adamw(net).step()
    return {name: (param.detach(), param.grad) for name, param in net.items()}


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.5, weight_decay=0.5)


def test_learners_average_each_dtype_and_leave_frozen_and_unused_parameters_alone(world):
    net = nn.ParameterDict({name: torch.ones(2, 3) for name in ("all", "one", "frozen", "unused")})
    net["short"] = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    net["large"] = nn.Parameter(torch.ones(4, dtype=torch.float16))
    net["frozen"].requires_grad_(False)
    grads = [{"all": 8.0, "short": 4.0, "large": 0.0}, {"all": 4.0, "one": 1.0, "large": 32768.0}]
    one = copy.deepcopy(net)  # means (1 g + 3 h) / 4, exact in each dtype
    for name, mean in {"all": 5.0, "one": 0.75, "short": 1.0, "large": 24576.0}.items():
        one[name].grad = torch.full_like(one[name], mean)
    adamw(one).step()
    for result in world(2, step, [net, copy.deepcopy(net)], grads):
        for name, (value, grad) in result.items():
            assert torch.equal(value, one[name])
            assert (grad is None) == (name in ("frozen", "unused"))
            assert grad is None or grad.dtype == value.dtype
            assert grad is None or torch.equal(grad, one[name].grad)


def is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
