"""The picture of the page on actors and learners: a real learner, whose actors' times are given."""

from __future__ import annotations

import heapq

import torch
from torch import nn

from braid.programs.schedule.bars import COLOURS, Bar, draw
from braid.rpc.rl import A3CLearner

UNROLL_S = (0.002, 0.003, 0.0075)  # of an unroll and its gradients, by actor
UPDATE_S = 0.0004
END_S = 0.03


def lag_of_actors() -> str:
    """Unrolls of three actors of different speed, by how old their weights are when they count."""
    net = nn.Linear(1, 1)
    learner = A3CLearner(net, torch.optim.SGD(net.parameters(), lr=0.1))
    gradients = [torch.zeros_like(param) for param in net.parameters()]
    bars: list[Bar] = []
    lags: dict[str, str] = {}
    ends = [(seconds, actor, 0, 0.0) for actor, seconds in enumerate(UNROLL_S)]
    free_s = 0.0
    while ends[0][0] < END_S:
        end_s, actor, version, start_s = heapq.heappop(ends)
        before = learner.statistics.version
        weights = learner.apply(gradients, version, 1, ())
        assert weights is not None
        lag = before - version
        colour = COLOURS[min(lag, len(COLOURS) - 1)]
        lags[f"lag {lag}"] = colour
        title = f"actor {actor}: weights {version}, counted at version {before}"
        bars.append(Bar(actor + 1, start_s, end_s, colour, title, f"{version}"))
        begin_s = max(end_s, free_s)
        free_s = begin_s + UPDATE_S
        bars.append(Bar(0, begin_s, free_s, colour, f"version {weights.version}"))
        heapq.heappush(ends, (free_s + UNROLL_S[actor], actor, weights.version, free_s))
    lanes = ["learner", *(f"actor {actor}" for actor in range(len(UNROLL_S)))]
    legend = dict(sorted(lags.items()))
    return draw(lanes, bars, END_S, legend=legend)
