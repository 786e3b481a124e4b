"""Reinforcement learning over remote calls: actors, learners, served policies, a league.

from braid import rl, rpc

rpc.init_rpc()
if rpc.own_role().name == "learner":
    learner = rl.ImpalaLearner(net, torch.optim.Adam(net.parameters(), lr=1e-3))
    rl.lead(learner, rpc.names_of("actor"), play, is_over=is_solved)
rpc.shutdown()
"""

from __future__ import annotations

from braid.rl.a3c import A3CLearner, play_a3c
from braid.rl.actor import Actor, Environment, Unroll, make_environment
from braid.rl.games import (
    Game,
    PerfectPlayer,
    Player,
    RandomPlayer,
    Record,
    TicTacToe,
    match,
)
from braid.rl.impala import ImpalaLearner, Replay, play_impala
from braid.rl.league import League, Member, Opponent, Result
from braid.rl.learner import Learner, Statistics
from braid.rl.losses import LossOptions, a3c_loss, impala_loss
from braid.rl.policies import Decision, LocalPolicy, Policy, Weights, weights_of
from braid.rl.self_play import Opponents, PolicyPlayer, SelfPlay
from braid.rl.serving import PolicyServer, ServedPolicy
from braid.rl.supervision import lead
from braid.rl.targets import Steps, VTrace, advantages, vtrace

__all__ = [
    "A3CLearner",
    "Actor",
    "Decision",
    "Environment",
    "Game",
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
