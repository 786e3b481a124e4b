"""Reinforcement learning over remote calls: actors, learners, served policies, a league.

from braid import rpc
from braid.rpc import rl

rpc.init_rpc()
if rpc.own_role().name == "learner":
    learner = rl.ImpalaLearner(net, torch.optim.Adam(net.parameters(), lr=1e-3))
    rl.lead(learner, rpc.names_of("actor"), play, is_over=is_solved)
rpc.shutdown()
"""

from __future__ import annotations

from braid.rpc.rl.a3c import A3CLearner, play_a3c
from braid.rpc.rl.actions import Gaussian
from braid.rpc.rl.actor import Actor, Environment, Unroll, make_environment
from braid.rpc.rl.games import (
    Game,
    PerfectPlayer,
    Player,
    RandomPlayer,
    Record,
    TicTacToe,
    match,
)
from braid.rpc.rl.impala import ImpalaLearner, Replay, play_impala
from braid.rpc.rl.league import League, Member, Opponent, Result
from braid.rpc.rl.learner import Learner, Statistics
from braid.rpc.rl.losses import LossOptions, a3c_loss, impala_loss
from braid.rpc.rl.policies import Decision, LocalPolicy, Policy, Weights, weights_of
from braid.rpc.rl.self_play import Opponents, PolicyPlayer, SelfPlay
from braid.rpc.rl.serving import PolicyServer, ServedPolicy
from braid.rpc.rl.supervision import lead
from braid.rpc.rl.targets import Steps, VTrace, advantages, vtrace

__all__ = [
    "A3CLearner",
    "Actor",
    "Decision",
    "Environment",
    "Game",
    "Gaussian",
    "ImpalaLearner",
    "League",
    "Learner",
    "LocalPolicy",
    "LossOptions",
    "Member",
    "Opponent",
    "Opponents",
    "PerfectPlayer",
    "Player",
    "Policy",
    "PolicyPlayer",
    "PolicyServer",
    "RandomPlayer",
    "Record",
    "Replay",
    "Result",
    "SelfPlay",
    "ServedPolicy",
    "Statistics",
    "Steps",
    "TicTacToe",
    "Unroll",
    "VTrace",
    "Weights",
    "a3c_loss",
    "advantages",
    "impala_loss",
    "lead",
    "make_environment",
    "match",
    "play_a3c",
    "play_impala",
    "vtrace",
    "weights_of",
]
