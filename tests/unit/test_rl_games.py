"""Rules, players, the league's draws, and a game as an environment."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from braid.errors import ConfigError
from braid.rpc.rl import (
    League,
    Opponents,
    PerfectPlayer,
    PolicyPlayer,
    RandomPlayer,
    Result,
    SelfPlay,
    TicTacToe,
    Weights,
    match,
    weights_of,
)

GAME = TicTacToe()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(18, 9)

    def forward(self, x):
        taken = (x[..., :9] + x[..., 9:]).bool()
        return self.layer(x).masked_fill(taken, float("-inf")), x.sum(-1)


def play(*squares: int) -> tuple[int, int]:
    state = GAME.begin()
    for square in squares:
        state = GAME.after(state, square)
    return state


def test_a_line_loses_for_the_player_to_move():
    lines = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
    for line in lines:
        others = [square for square in range(9) if square not in line]
        assert GAME.outcome(play(line[0], others[0], line[1], others[1], line[2])) == -1
    assert GAME.outcome(play(0, 1, 2, 4, 3, 5, 7, 6, 8)) == 0
    assert GAME.outcome(play(0, 1)) is None


def test_a_taken_square_is_refused_with_the_empty_ones():
    with pytest.raises(ConfigError, match=r"square 4 is taken.*choose one of \[0, 1, 2, 3, 5"):
        play(4, 4)


def test_perfect_players_draw_and_lose_to_nobody():
    perfect, other = PerfectPlayer(GAME, 0), PerfectPlayer(GAME, 1)
    assert perfect.value(GAME.begin()) == 0
    assert match(GAME, perfect, other, 50) == (0, 50, 0)
    against_random = match(GAME, perfect, RandomPlayer(GAME, 2), 200)
    assert against_random.losses == 0
    assert against_random.score > 0.85


def test_the_match_begins_in_turn_and_counts_for_the_first_player():
    def first_empty(state):
        return GAME.moves(state)[0]

    record = match(GAME, first_empty, first_empty, 10)  # whoever begins wins by 2 4 6
    assert record == (5, 0, 5)
    assert record.score == 0.5


def test_the_league_draws_strong_opponents_more_often():
    league = League(latest=0.0, seed=3)
    for version in range(3):
        league.freeze(Weights(version, {}))
    for _ in range(200):
        league.draw([Result(0, 1.0), Result(1, 0.5), Result(2, 0.0)])
    scores = [round(each.score, 2) for each in league.members]
    assert scores == [1.0, 0.5, 0.0]
    drawn = Counter(league.draw().number for _ in range(3000))
    # weights 0.02, 0.27 and 1.02
    assert [round(drawn[n] / 3000, 1) for n in range(3)] == [0.0, 0.2, 0.8]


def test_a_share_of_the_games_is_against_the_last_member():
    league = League(latest=1.0)
    for version in range(4):
        league.freeze(Weights(version, {}))
    assert {league.draw().number for _ in range(50)} == {3}


def test_a_league_refuses_draws_without_members_and_results_of_nobody():
    league = League()
    with pytest.raises(ConfigError, match="with the first weights"):
        league.draw()
    league.freeze(Weights(0, {}))
    with pytest.raises(ConfigError, match="a member from 0 to 0"):
        league.draw([Result(1, 0.5)])
    with pytest.raises(ConfigError, match="latest must be"):
        League(latest=2.0)


def test_games_against_the_league_are_episodes_whose_results_it_gets():
    torch.manual_seed(0)
    league = League()
    league.freeze(weights_of(Net(), 0))
    opponents = Opponents(league, GAME, Net, num_games=5, seed=1)
    environment = SelfPlay(GAME, opponents)
    player = RandomPlayer(GAME, 5)
    rewards, firsts = [], []
    for _ in range(20):
        observation, _ = environment.reset()
        firsts.append(int(observation.sum()))
        over = False
        while not over:
            empty = [n for n in range(9) if not observation[n] and not observation[9 + n]]
            move = empty[player(play()) % len(empty)]
            observation, reward, over, cut, _ = environment.step(move)
            assert not cut
        rewards.append(reward)
    opponents.next()
    (member,) = league.members
    assert firsts == [0, 1] * 10  # every second game the opponent has moved already
    assert set(rewards) <= {-1.0, 0.0, 1.0}
    assert member.games == 20
    assert member.score == pytest.approx(sum(rewards) / 40 + 0.5, abs=0.05)


def test_a_policy_plays_permitted_moves_only():
    torch.manual_seed(0)
    sampling = PolicyPlayer(GAME, Net(), seed=1)
    greedy = PolicyPlayer(GAME, Net())
    assert sum(match(GAME, sampling, greedy, 40)) == 40
