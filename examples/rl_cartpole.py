"""CartPole-v1 with actors and a learner, trained until it is solved.

    pip install 'braid-train[rl]'
    braid run --role learner:1 --role actor:2 --expendable-role actor examples/rl_cartpole.py
    braid run --role learner:1 --role actor:4 examples/rl_cartpole.py --algorithm a3c --seed 2

It is solved when the last 100 episodes have a mean return of at least 475, and so do 100 new ones
in which the policy always takes its most probable action.
"""

import argparse
import time

import torch
from torch import nn

from braid import rpc
from braid.rpc import rl

NAME, SOLVED, ENVIRONMENTS, UNROLL = "CartPole-v1", 475.0, 8, 32
OPTIONS = rl.LossOptions(lambda_=0.95)


class Net(nn.Module):
    """A policy, and the value of a state."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        sizes = [(4, hidden), (hidden, hidden)]
        layers = [part for size in sizes for part in (nn.Linear(*size), nn.Tanh())]
        self.policy = nn.Sequential(*layers, nn.Linear(hidden, 2))
        layers = [part for size in sizes for part in (nn.Linear(*size), nn.Tanh())]
        self.value = nn.Sequential(*layers, nn.Linear(hidden, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the two actions and the value."""
        return self.policy(x), self.value(x).squeeze(-1)


def play(learner: rpc.RRef, number: int, algorithm: str, seed: int, server: rpc.RRef) -> None:
    """Play and send experience until training is over; runs in an actor."""
    seed = 1000 * seed + 100 * number
    served = algorithm == "served"
    policy = rl.ServedPolicy(server) if served else rl.LocalPolicy(Net(), seed)
    environments = [rl.make_environment(NAME) for _ in range(ENVIRONMENTS)]
    actor = rl.Actor(environments, policy, unroll_length=UNROLL, seed=seed)
    if algorithm == "a3c":
        rl.play_a3c(learner.rpc_sync(0), actor, OPTIONS)
    else:
        rl.play_impala(learner.rpc_async(0), actor)


class Exam:
    """Ends training when the last 100 episodes, and then 100 new ones, are good enough."""

    def __init__(self) -> None:
        self.learner: rl.Learner | None = None
        self.shown = self.failed_at = 0

    def is_over(self, now: rl.Statistics) -> bool:
        """Return whether the task is solved; print the progress."""
        if now.steps >= self.shown:
            self.shown += 100_000
            print(f"{now.steps:8} steps, {now.episodes:5} episodes: return {now.mean_return:5.1f}")
        if now.mean_return < SOLVED or not now.is_full or now.episodes < self.failed_at + 50:
            return False
        weights = self.learner.weights()
        result, self.failed_at = evaluate(weights), now.episodes
        print(f"{now.steps:8} steps: the last 100 episodes {now.mean_return:.1f}, new {result:.1f}")
        return result >= SOLVED


def train(algorithm: str, seed: int, actors: list[str]) -> None:
    """Learn until the task is solved; runs in the learner."""
    torch.manual_seed(seed)
    net, exam, began = Net(), Exam(), time.monotonic()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    server = rl.PolicyServer(Net(), max_size=len(actors), seed=seed)
    server.load(rl.Weights(-1, net.state_dict()))
    if algorithm == "a3c":
        exam.learner = rl.A3CLearner(net, optimizer)
    else:
        exam.learner = rl.ImpalaLearner(net, optimizer, OPTIONS, serving=[server])
    args = (algorithm, seed, rpc.RRef(server))
    end = rl.lead(exam.learner, actors, play, args, is_over=exam.is_over)
    print(f"solved in {time.monotonic() - began:.0f} s by {algorithm}, lag {end.mean_lag:.1f}")


def evaluate(weights: rl.Weights) -> float:
    """Return the mean return of 100 new episodes by the most probable actions."""
    net, environment, total = Net(), rl.make_environment(NAME), 0.0
    net.load_state_dict(weights.state)
    for episode in range(100):
        state, _ = environment.reset(seed=10**6 + episode)
        over = False
        while not over:
            logits, _ = net(torch.from_numpy(state))
            state, reward, ended, cut, _ = environment.step(int(logits.argmax()))
            total, over = total + reward, ended or cut
    return total / 100


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=["impala", "a3c", "served"], default="impala")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rpc.init_rpc()
    if rpc.own_role().name == "learner":
        train(options.algorithm, options.seed, rpc.names_of("actor"))
    rpc.shutdown()
