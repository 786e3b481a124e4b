"""A policy learns tic-tac-toe by self-play, in a league of its earlier versions.

    braid run --role learner:1 --role actor:2 --expendable-role actor examples/rl_league.py

Actors play against members of the league; the learner adds its policy to the league every 100
versions. At the end the policy plays against a random player, and against a perfect player; before
training it loses most of those games.
"""

import torch
from torch import nn

from braid import rpc
from braid.rpc import rl

GAME, STEPS, FREEZE_EVERY = rl.TicTacToe(), 250_000, 100
OPTIONS = rl.LossOptions(discount=1.0, lambda_=0.9, entropy_cost=0.1, value_cost=1.0)


class Net(nn.Module):
    """A policy that makes only legal moves, and the value of a state."""

    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(18, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
        )
        self.policy, self.value = nn.Linear(hidden, 9), nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the nine squares and the value."""
        features = self.body(x)
        is_taken = (x[..., :9] + x[..., 9:]).bool()
        logits = self.policy(features).masked_fill(is_taken, float("-inf"))
        return logits, self.value(features).squeeze(-1).tanh()


def play(learner: rpc.RRef, number: int, league: rpc.RRef) -> None:
    """Play against members of the league until training is over; runs in an actor."""
    opponents = rl.Opponents(league.rpc_sync(), GAME, Net, num_games=4, seed=1000 * number)
    environments = [rl.SelfPlay(GAME, opponents) for _ in range(16)]
    actor = rl.Actor(environments, rl.LocalPolicy(Net(), number), unroll_length=8, seed=number)
    rl.play_impala(learner.rpc_async(0), actor)


def train(actors: list[str]) -> None:
    """Learn, and add versions to the league; runs in the learner."""
    torch.manual_seed(1)
    net = Net()
    print(f"before: {strength(net)}")
    league = rl.League(seed=1)
    learner = rl.ImpalaLearner(
        net,
        torch.optim.Adam(net.parameters(), lr=1e-3),
        OPTIONS,
        replay=rl.Replay(2000, seed=1),  # each unroll is used four times
        num_replayed=3,
        max_grad_norm=5.0,
    )
    league.freeze(rl.weights_of(net, 0))

    def is_over(now: rl.Statistics) -> bool:
        if now.version and now.version % FREEZE_EVERY == 0:
            league.freeze(learner.weights())
            print(
                f"{now.steps:7} steps, {now.episodes:6} games: mean outcome {now.mean_return:+.2f}"
            )
        return now.steps >= STEPS

    end = rl.lead(learner, actors, play, (rpc.RRef(league),), is_over=is_over)
    print(f"after {end.episodes} games against {len(league.members)} members: {strength(net)}")


def strength(net: Net) -> str:
    """Return the results of 200 games each against the random and the perfect player."""
    player = rl.PolicyPlayer(GAME, net)
    records = [
        f"{kind.__name__} {won} won {drawn} drawn {lost} lost"
        for kind in (rl.RandomPlayer, rl.PerfectPlayer)
        for won, drawn, lost in [rl.match(GAME, player, kind(GAME, 7), 200)]
    ]
    return ", ".join(records)


if __name__ == "__main__":
    rpc.init_rpc()
    if rpc.own_role().name == "learner":
        train(rpc.names_of("actor"))
    rpc.shutdown()
