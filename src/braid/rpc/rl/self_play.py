"""A board game as an environment: the opponent's moves are a part of its steps.

step(move):  own move -> over? -> opponent's move -> over? -> the state to move in
reset():     next opponent; every second game it begins
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from braid.rpc.rl.games import Game, Player
from braid.rpc.rl.league import Result
from braid.rpc.rl.policies import LocalPolicy

__all__ = ["Opponents", "PolicyPlayer", "SelfPlay"]

NUM_KEPT = 8  # modules of opponents in an actor


class PolicyPlayer:
    """Player of a game that makes the moves of a policy.

    Args:
        game: The rules.
        module: Module of the policy; its logits exclude moves that the rules do not permit.
        seed: Seed of its choices; None for the most probable move.
    """

    def __init__(self, game: Game, module: nn.Module, seed: int | None = None) -> None:
        self._game = game
        self._module = module
        self._policy = None if seed is None else LocalPolicy(module, seed)

    def __call__(self, state: Any) -> int:
        """Return a move."""
        observation = torch.tensor([self._game.observe(state)])
        if self._policy is not None:
            return int(self._policy.decide(observation).actions)
        with torch.no_grad():
            return int(self._module(observation)[0].argmax())


class Opponents:
    """Draws an actor's opponents from a league, and reports the results to it.

    Args:
        league: The league, or a proxy of it: `reference.rpc_sync()`.
        game: The rules.
        make_module: Function that returns a module, into which a member's weights are loaded.
        num_games: Games against an opponent before the next one is drawn.
        seed: Seed of the opponents' choices.
    """

    def __init__(
        self,
        league: Any,
        game: Game,
        make_module: Callable[[], nn.Module],
        *,
        num_games: int = 16,
        seed: int = 0,
    ) -> None:
        self._league = league
        self._game = game
        self._make_module = make_module
        self._num_games = num_games
        self._seed = seed
        self._left = 0
        self._number = -1
        self._players: OrderedDict[int, PolicyPlayer] = OrderedDict()
        self._results: list[Result] = []

    def next(self) -> tuple[int, Player]:
        """Return the opponent of the next game: its number in the league, and the player."""
        if not self._left:
            results, self._results = self._results, []
            number, weights = self._league.draw(results)
            self._number, self._left = number, self._num_games
            if number not in self._players:
                module = self._make_module()
                module.load_state_dict(weights.state)
                self._players[number] = PolicyPlayer(self._game, module, self._seed + number)
            self._players.move_to_end(number)
            while len(self._players) > NUM_KEPT:
                self._players.popitem(last=False)
        self._left -= 1
        return self._number, self._players[self._number]

    def report(self, number: int, reward: float) -> None:
        """Record a game against opponent `number`: 1 for a win, 0 for a draw, -1 for a loss."""
        self._results.append(Result(number, (reward + 1) / 2))


class SelfPlay:
    """An environment in which an opponent moves after each step; the reward is the outcome.

    Args:
        game: The rules.
        opponents: Opponents of its games.
    """

    def __init__(self, game: Game, opponents: Opponents) -> None:
        self._game = game
        self._opponents = opponents
        self._begins = False
        self._number = -1
        self._opponent: Player = lambda _: 0
        self._state: Any = None

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin a game against the next opponent."""
        del seed  # nothing here is drawn
        self._number, self._opponent = self._opponents.next()
        self._state = self._game.begin()
        self._begins = not self._begins
        if not self._begins:
            self._move(self._opponent(self._state))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Make a move, after which the opponent moves; return as `Environment.step` does."""
        outcome = self._move(int(action))
        if outcome is None:
            outcome = self._move(self._opponent(self._state))
            reward = outcome
        else:
            reward = -outcome
        if reward is not None:
            self._opponents.report(self._number, reward)
        return self._observation(), reward or 0.0, reward is not None, False, {}

    def _move(self, move: int) -> float | None:
        """Make a move; return the outcome for the next player, None if the game goes on."""
        self._state = self._game.after(self._state, move)
        return self._game.outcome(self._state)

    def _observation(self) -> Any:
        return np.array(self._game.observe(self._state), np.float32)
