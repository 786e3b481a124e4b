"""Two actors, one of which is killed in the middle of its third unroll."""

from __future__ import annotations

import os
import signal
import sys

import torch
from rl_worlds import Corridor, Net
from torch import nn

from braid import rpc
from braid.rpc import rl

UNROLLS = 40


class Fatal(Corridor):
    """A corridor in which the third unroll of an actor kills its process."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def step(self, action):
        self.total += 1
        if self.total == 15 and "BRAID_PROCESS" not in os.environ:  # in its first life
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Counted(rl.ImpalaLearner):
    """A learner that knows whose unrolls it gets, by their number of environments."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, torch.optim.SGD(net.parameters(), lr=0.1))
        self.counts = {1: 0, 2: 0}
        self.versions_again: list[int] = []  # of the new process's unrolls

    @rpc.functions.async_execution
    def add(self, unroll):
        self.counts[unroll.actions.shape[1]] += 1
        if unroll.actions.shape[1] == 1 and self.statistics.lost:
            self.versions_again.append(unroll.version)
        return super().add(unroll)


def play(learner: rpc.RRef, number: int) -> None:
    """Play; runs in an actor."""
    worlds = [Fatal()] if number == 1 else [Corridor(), Corridor()]
    actor = rl.Actor(worlds, rl.LocalPolicy(Net(), number), unroll_length=6, seed=number)
    rl.play_impala(learner.rpc_async(0), actor)


def is_over(now: rl.Statistics) -> bool:
    """Whether the lost actor is known, and the other has gone on."""
    is_enough = bool(now.lost) and sum(now.lags.values()) >= UNROLLS
    return is_enough and ("again" not in sys.argv or learner.counts[1] > 2)


if __name__ == "__main__":
    rpc.init_rpc()
    if rpc.own_role().name == "learner":
        learner = Counted(Net())
        end = rl.lead(learner, rpc.names_of("actor"), play, is_over=is_over)
        enough = sum(end.lags.values()) >= UNROLLS
        print(f"lost {end.lost}, learned from {UNROLLS} unrolls or more: {enough}")
        print(f"{learner.counts[1]} whole unrolls of actor:1")
        print(f"a new process began with newer weights: {learner.versions_again[:1] > [0]}")
    rpc.shutdown()
