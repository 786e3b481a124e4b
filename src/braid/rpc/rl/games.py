"""Board games of two players, players that need no training, and matches between players.

A state is described from the view of the player to move. `TicTacToe` is small enough for
`PerfectPlayer`, which searches all games (minimax) and never loses, so the share of draws measures
the strength of its opponent.

Source: C. Shannon, "Programming a Computer for Playing Chess", 1950, for minimax.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from braid.errors import ConfigError

__all__ = ["Game", "PerfectPlayer", "Player", "RandomPlayer", "Record", "TicTacToe", "match"]

State: TypeAlias = Any  # hashable
Player: TypeAlias = Callable[[State], int]  # chooses a move


class Game(Protocol):
    """Rules of a game of two players who move in turn.

    Attributes:
        num_moves: Number of moves, permitted or not; they are 0 to `num_moves` - 1.
    """

    num_moves: int

    def begin(self) -> State:
        """Return the first state."""

    def moves(self, state: State) -> Sequence[int]:
        """Return the moves that the rules permit."""

    def after(self, state: State, move: int) -> State:
        """Return the state after a move, as the other player sees it."""

    def outcome(self, state: State) -> float | None:
        """Return 1, 0 or -1 for the player to move if the game is over, else None."""

    def observe(self, state: State) -> Sequence[float]:
        """Return the state as numbers."""


class TicTacToe:
    """Three in a row on nine squares.

    A state is a pair: the squares of the player to move, and the squares of the other player.
    Squares are bits of a number: bit 0 is the first square of the first row.
    """

    num_moves = 9
    LINES = (0o007, 0o070, 0o700, 0o111, 0o222, 0o444, 0o421, 0o124)

    def begin(self) -> State:
        """Return the empty board."""
        return (0, 0)

    def moves(self, state: State) -> Sequence[int]:
        """Return the empty squares."""
        mover, other = state
        return [square for square in range(9) if not (mover | other) >> square & 1]

    def after(self, state: State, move: int) -> State:
        """Return the state after a move."""
        mover, other = state
        if not 0 <= move < 9 or (mover | other) >> move & 1:
            msg = f"square {move} is taken or not on the board; choose one of {self.moves(state)}"
            raise ConfigError(msg)
        return (other, mover | 1 << move)

    def outcome(self, state: State) -> float | None:
        """Return -1 if the other player has a line, 0 on a full board, else None."""
        mover, other = state
        if any(other & line == line for line in self.LINES):
            return -1.0
        return 0.0 if mover | other == 0o777 else None

    def observe(self, state: State) -> Sequence[float]:
        """Return 18 numbers: the squares of the player to move, then the others'."""
        return [float(squares >> square & 1) for squares in state for square in range(9)]


class RandomPlayer:
    """Plays any move that the rules permit.

    Args:
        game: The rules.
        seed: Seed of its choices.
    """

    def __init__(self, game: Game, seed: int) -> None:
        self._game = game
        self._random = random.Random(seed)

    def __call__(self, state: State) -> int:
        """Return a move."""
        return self._random.choice(self._game.moves(state))


class PerfectPlayer:
    """Plays one of the best moves, drawn uniformly.

    Args:
        game: The rules of a game with few enough states to visit all of them.
        seed: Seed of its choices.
    """

    def __init__(self, game: Game, seed: int) -> None:
        self._game = game
        self._random = random.Random(seed)
        self._values: dict[State, float] = {}

    def __call__(self, state: State) -> int:
        """Return a move."""
        moves = self._game.moves(state)
        values = [-self.value(self._game.after(state, move)) for move in moves]
        best = [move for move, value in zip(moves, values, strict=True) if value == max(values)]
        return self._random.choice(best)

    def value(self, state: State) -> float:
        """Return the outcome for the player to move if both play perfectly."""
        if state not in self._values:
            outcome = self._game.outcome(state)
            if outcome is None:
                following = [self._game.after(state, move) for move in self._game.moves(state)]
                outcome = max(-self.value(next_state) for next_state in following)
            self._values[state] = outcome
        return self._values[state]


class Record(NamedTuple):
    """Numbers of games that a player has won, drawn and lost.

    Attributes:
        wins: Number of games that it has won.
        draws: Number of games without a winner.
        losses: Number of games that it has lost.
    """

    wins: int
    draws: int
    losses: int

    @property
    def score(self) -> float:
        """Share of games won, a draw for half."""
        return (self.wins + self.draws / 2) / max(1, sum(self))


def match(game: Game, player: Player, opponent: Player, num_games: int) -> Record:
    """Play games between two players, who begin in turn; return the record of `player`."""
    ends = {1.0: 0, 0.0: 0, -1.0: 0}
    for number in range(num_games):
        second = number % 2  # the turn of the first player
        sides = (opponent, player) if second else (player, opponent)
        state, turn = game.begin(), 0
        while (outcome := game.outcome(state)) is None:
            state = game.after(state, sides[turn % 2](state))
            turn += 1
        ends[outcome if turn % 2 == second else -outcome] += 1
    return Record(ends[1.0], ends[0.0], ends[-1.0])
