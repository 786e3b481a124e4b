"""A3C: a learner with one actor is compared with one process, then it learns from two actors.

braid run --role learner:1 --role actor:2 --expendable-role actor examples/45_actors_and_learners.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from braid import rpc
from braid.rpc import rl

PLACES, UPDATES, OPTIONS = 8, 60, rl.LossOptions(discount=0.9)


class Corridor:
    """Eight places in a row; the last place ends an episode with reward 1; 40 steps at most."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Start at the first place."""
        del seed
        self.place = self.steps = 0
        return torch.eye(PLACES)[0].numpy(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go right with 1, left with 0."""
        self.place, self.steps = max(0, self.place + 2 * action - 1), self.steps + 1
        ended = self.place == PLACES - 1
        return torch.eye(PLACES)[self.place].numpy(), float(ended), ended, self.steps == 40, {}


class Net(nn.Linear):
    """Two logits and a value for each place."""

    def __init__(self) -> None:
        super().__init__(PLACES, 3, bias=False)
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and values."""
        out = super().forward(x)
        return out[..., :2], out[..., 2]


class Versions:
    """A policy in the learner's process that records the weights of each version."""

    def __init__(self) -> None:
        self.weights = {}

    def load(self, weights: rl.Weights) -> None:
        """Record a version."""
        self.weights[weights.version] = weights.state["weight"]


def actor_of(number: int) -> rl.Actor:
    """Return an actor with four corridors."""
    policy = rl.LocalPolicy(Net(), seed=number)
    return rl.Actor([Corridor() for _ in range(4)], policy, unroll_length=8, seed=number)


def play(learner: rpc.RRef, number: int) -> None:
    """Play until training is over; runs in an actor."""
    rl.play_a3c(learner.rpc_sync(0), actor_of(number), OPTIONS)


def learner_of(kept: Versions) -> rl.A3CLearner:
    """Return a learner that stores its versions in `kept`."""
    net = Net()
    return rl.A3CLearner(net, torch.optim.SGD(net.parameters(), lr=2.0), serving=[kept])


def is_over(now: rl.Statistics) -> bool:
    """Return whether the learner has made enough updates."""
    return now.version >= UPDATES


def train(actors: list[str]) -> None:
    """Learn from an actor in this process, from the same actor by calls, and from all actors."""
    here, calls = Versions(), Versions()
    local = learner_of(here)
    with ThreadPoolExecutor() as pool:
        playing = pool.submit(rl.play_a3c, local, actor_of(0), OPTIONS)
        local.join("here")
        while not is_over(local.statistics):
            local.step()
        local.stop()
        playing.result()
    rl.lead(learner_of(calls), actors[:1], play, is_over=is_over)
    for n in range(1, UPDATES + 1):
        assert torch.equal(here.weights[n], calls.weights[n])
    print(f"{UPDATES} versions by one actor equal one process bit by bit")
    end = rl.lead(learner_of(Versions()), actors, play, is_over=is_over)
    print(f"{len(actors)} actors: mean return {end.mean_return:.2f}, lags {set(end.lags)}")


if __name__ == "__main__":
    rpc.init_rpc()
    if rpc.own_role().name == "learner":
        train(rpc.names_of("actor"))
    rpc.shutdown()
