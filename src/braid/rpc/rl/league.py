"""A league: the newest policy plays against past policies, more often where it is weak.

    learner: now and then ── freeze ──> member k
    actor:   draw ──> an opponent, and its weights;  its games' scores come with the next draw

A policy that plays only against itself forgets how to beat earlier versions. An opponent is drawn
with a weight of (1 - p)^power, where p is the newest policy's score against it; a share of the
games is against the last member, so against (almost) itself.

Source: O. Vinyals et al., "Grandmaster level in StarCraft II using multi-agent reinforcement
learning", Nature 2019: prioritized fictitious self-play.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import NamedTuple

from braid.errors import ConfigError
from braid.rpc import register
from braid.rpc.rl.policies import Weights

__all__ = ["League", "Member", "Opponent", "Result"]

KEEPS = 0.98  # of a score's weight after each game, since the newest policy changes
LEAST = 0.02  # of the weights of draws, so that none is forgotten


@register
class Opponent(NamedTuple):
    """Member of the league that was drawn as an opponent.

    Attributes:
        number: Number of the member.
        weights: Weights of its policy.
    """

    number: int
    weights: Weights


@register
class Result(NamedTuple):
    """Result of one game of the newest policy against a member of the league.

    Attributes:
        number: Number of the member that was the opponent.
        score: 1 for a win of the newest policy, 0.5 for a draw, 0 for a loss.
    """

    number: int
    score: float


class Member(NamedTuple):
    """Member of a league: an earlier version of the policy, and the score against it.

    Attributes:
        version: Version of the weights.
        games: Number of games against it.
        score: Score of the newest policy against it; older games count less.
    """

    version: int
    games: int
    score: float


class League:
    """League of earlier policies, from which opponents for self-play are drawn.

    Args:
        latest: Share of games against the last member.
        power: Preference for opponents against which the score is low; 0 for none.
        seed: Seed of the draws.

    Raises:
        ConfigError: A number is out of its range.
    """

    def __init__(self, *, latest: float = 0.35, power: float = 2.0, seed: int = 0) -> None:
        if not 0 <= latest <= 1 or power < 0:
            msg = f"latest must be between 0 and 1 and power >= 0, got {latest} and {power}"
            raise ConfigError(msg)
        self._latest = latest
        self._power = power
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._weights: list[Weights] = []
        self._members: list[Member] = []

    @property
    def members(self) -> list[Member]:
        """Members of the league, the oldest first."""
        with self._lock:
            return list(self._members)

    def freeze(self, weights: Weights) -> int:
        """Add a member with these weights; return its number."""
        with self._lock:
            self._weights.append(weights)
            self._members.append(Member(weights.version, 0, 0.5))
            return len(self._members) - 1

    def draw(self, results: Sequence[Result] = ()) -> Opponent:
        """Record the results of games, then draw an opponent.

        Raises:
            ConfigError: The league has no member, or a result has an unknown member.
        """
        with self._lock:
            for number, score in results:
                self._count(number, score)
            if not self._members:
                msg = (
                    "the league has no member to play against: call freeze() with the first "
                    "weights before actors play"
                )
                raise ConfigError(msg)
            last = len(self._members) - 1
            if self._random.random() < self._latest:
                return Opponent(last, self._weights[last])
            weights = [LEAST + (1 - member.score) ** self._power for member in self._members]
            (number,) = self._random.choices(range(last + 1), weights)
            return Opponent(number, self._weights[number])

    def _count(self, number: int, score: float) -> None:
        if not 0 <= number < len(self._members) or not 0 <= score <= 1:
            msg = (
                f"report() needs the number of a member from 0 to {len(self._members) - 1} and a "
                f"score from 0 to 1, got {number} and {score}"
            )
            raise ConfigError(msg)
        version, games, before = self._members[number]
        kept = min(KEEPS, games / (games + 1))  # at first the plain mean
        self._members[number] = Member(version, games + 1, kept * before + (1 - kept) * score)
