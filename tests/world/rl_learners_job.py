"""Two learners that average their gradients, each with an actor of its own."""

from __future__ import annotations

import torch
from rl_worlds import Corridor, Net

import braid
from braid import rpc
from braid.rpc import rl


def play(learner: rpc.RRef, number: int, learner_number: int) -> None:
    """Play; runs in an actor."""
    worlds = [Corridor() for _ in range(2 + learner_number)]
    policy = rl.LocalPolicy(Net(), learner_number)
    actor = rl.Actor(worlds, policy, unroll_length=6, seed=number)
    rl.play_impala(learner.rpc_async(0), actor)


def is_over(now: rl.Statistics) -> bool:
    """Whether the first learner has made its updates; the second one never ends."""
    return own.number == 0 and now.version >= 20


if __name__ == "__main__":
    own = rpc.own_role()
    group = braid.init().split(0 if own.name == "learner" else None)
    rpc.init_rpc()
    if group is not None:
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        learner = rl.ImpalaLearner(net, optimizer, group=group)
        actor = rpc.names_of("actor")[own.number]
        end = rl.lead(learner, [actor], play, (own.number,), is_over=is_over)
        flat = torch.cat([p.detach().flatten() for p in net.parameters()])
        weights = group.all_gather(flat).view(2, -1)
        versions = group.all_gather(torch.tensor([end.version])).tolist()
        is_same = torch.equal(*weights) and versions[0] == versions[1]
        if own.number == 0:
            print(
                f"both ended at version 20 or later: {min(versions) >= 20}, "
                f"with the same weights: {is_same}"
            )
    rpc.shutdown()
