"""What the validator lets pass is right: valid programs with one action changed, carried out on numbers.

The numbers are carried out by lines of messages only, with no regard to the order that the validator has found.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import groupby

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from braid.programs.schedule import Action, Program, validate
from braid.programs.schedule.collective import algorithm, program
from braid.programs.schedule.known import RULES

MADE = [
    program(algorithm(name, operation, num_ranks, root=root, row=2))
    for name, operation, num_ranks, root in [
        ("ring", "all_reduce", 3, None),
        ("ring", "reduce_scatter", 3, None),
        ("doubling", "all_reduce", 3, None),
        ("halving_doubling", "all_reduce", 4, None),
        ("hierarchical", "all_reduce", 4, None),
        ("tree", "reduce", 4, 1),
        ("tree", "broadcast", 4, 2),
        ("tree", "gather", 3, 1),
        ("tree", "scatter", 4, 3),
        ("bruck", "all_gather", 4, None),
        ("bruck", "all_to_all", 3, None),
        ("pairwise", "all_to_all", 3, None),
        ("naive", "all_reduce", 3, None),
    ]
]
RUBBISH = 10**9  # in blocks that hold nothing of use; larger than any sum of what does
WAYS = ("delete", "duplicate", "swap", "unit", "rename")


def worth(rank: int, block: int) -> int:
    """What `rank` contributes to a block: a digit of its own, so that sums tell who is in them, and how often."""
    return (block + 1) * 10**rank


def at_start(written: Program) -> list[list[int]]:
    header, p = written.header, written.num_ranks
    own = {
        "gather": lambda r, b: r == b,
        "all_gather": lambda r, b: r == b,
        "broadcast": lambda r, _: r == header.root,
        "scatter": lambda r, _: r == header.root,
        "all_to_all": lambda _, b: b < p,
    }.get(header.operation, lambda *_: True)
    blocks = range(header.num_units)
    return [[worth(r, b) if own(r, b) else RUBBISH for b in blocks] for r in range(p)]


def is_right(written: Program, ended: list[list[int]]) -> bool:
    """Whether every rank has what the operation promises it; the rest of its buffer may hold anything."""
    operation, root = written.header.operation, written.header.root
    ranks, blocks = range(written.num_ranks), range(written.header.num_units)
    sums = [sum(worth(r, b) for r in ranks) for b in blocks]
    if operation == "all_reduce":
        return ended == [sums for _ in ranks]
    if operation == "reduce":
        return ended[root] == sums
    if operation == "reduce_scatter":
        return [ended[r][r] for r in ranks] == sums
    if operation == "broadcast":
        return ended == [[worth(root, b) for b in blocks] for _ in ranks]
    if operation == "scatter":
        return [ended[r][r] for r in ranks] == [worth(root, b) for b in blocks]
    if operation == "gather":
        return ended[root] == [worth(r, r) for r in ranks]
    if operation == "all_gather":
        return ended == [[worth(r, r) for r in ranks] for _ in ranks]
    assert operation == "all_to_all"
    return [own[len(ranks) :] for own in ended] == [[worth(i, j) for i in ranks] for j in ranks]


def carry_out(written: Program) -> list[list[int]]:
    """Rank by rank as far as it comes; what a round sends is taken before what it receives is written."""
    holds = at_start(written)
    lines: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    left = [
        deque([list(beside) for _, beside in groupby(actions, key=lambda a: a.index)])
        for actions in written.ranks
    ]
    posted = [False] * written.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, rounds in enumerate(left):
            if not rounds:
                continue
            if not posted[rank]:
                posted[rank] = moved = True
                for action in rounds[0]:
                    if action.kind == "send":
                        lines[rank, action.peer].append(holds[rank][action.unit])
            comes = [a.peer for a in rounds[0] if a.kind in {"recv", "reduce"}]
            if all(len(lines[peer, rank]) >= comes.count(peer) for peer in comes):
                _write(holds[rank], rounds.popleft(), rank, lines)
                posted[rank], moved = False, True
    assert not any(left), "it does not end"
    return holds


def _write(
    own: list[int], together: list[Action], rank: int, lines: dict[tuple[int, int], deque[int]]
) -> None:
    before = list(own)
    for action in together:
        if action.kind == "copy":
            own[action.unit] = before[action.edge]
        elif action.kind != "send":
            came = lines[action.peer, rank].popleft()
            own[action.unit] = came + (own[action.unit] if action.kind == "reduce" else 0)


def mutated(written: Program, rank: int, position: int, way: str, number: int) -> Program:
    actions = list(written.ranks[rank])
    action = actions[position]
    if way == "delete":
        del actions[position]
    elif way == "duplicate":
        actions.insert(position, action)
    elif way == "swap":
        other = number % len(actions)
        actions[position], actions[other] = actions[other], actions[position]
    elif way == "unit":
        actions[position] = action._replace(unit=number % written.header.num_units)
    elif way == "index":
        actions[position] = action._replace(index=number % written.header.num_indices)
    else:
        other_kind = {"recv": "reduce", "reduce": "recv"}.get(action.kind, action.kind)
        actions[position] = action._replace(kind=other_kind)
    ranks = (*written.ranks[:rank], tuple(actions), *written.ranks[rank + 1 :])
    return written._replace(ranks=ranks)


def check(written: Program, rank: int, position: int, way: str, number: int) -> bool:
    """That what passes is right; returns whether it passes."""
    changed = mutated(written, rank, position, way, number)
    passes = not validate(changed, RULES)
    assert not passes or is_right(changed, carry_out(changed)), (way, rank, position, number)
    return passes


@pytest.mark.parametrize("written", MADE, ids=str)
def test_programs_of_the_catalogue_are_right_on_numbers(written: Program) -> None:
    assert is_right(written, carry_out(written))


@st.composite
def changes(draw: st.DrawFn) -> tuple[Program, int, int, str, int]:
    written = draw(st.sampled_from(MADE))
    rank = draw(st.sampled_from([r for r, actions in enumerate(written.ranks) if actions]))
    position = draw(st.integers(0, len(written.ranks[rank]) - 1))
    return written, rank, position, draw(st.sampled_from(WAYS)), draw(st.integers(0, 40))


@given(changes())
@example((MADE[0], 0, 0, "swap", 1))
def test_a_program_with_one_action_changed_is_found_out_or_still_right(
    change: tuple[Program, int, int, str, int],
) -> None:
    check(*change)


@pytest.mark.proof
@pytest.mark.parametrize("written", MADE, ids=str)
def test_every_change_of_one_action_is_found_out_or_leaves_the_program_right(
    written: Program,
) -> None:
    for rank, actions in enumerate(written.ranks):
        for position in range(len(actions)):
            for way in WAYS:
                for number in range(max(len(actions), written.header.num_units)):
                    check(written, rank, position, way, number)


@pytest.mark.parametrize("written", MADE, ids=str)
def test_no_message_of_the_catalogue_can_be_left_out_or_sent_twice(written: Program) -> None:
    passing = [
        (rank, position, way)
        for rank, actions in enumerate(written.ranks)
        for position, action in enumerate(actions)
        for way in ("delete", "duplicate")
        if action.kind != "copy" and check(written, rank, position, way, 0)
    ]
    assert passing == []


def test_some_changes_do_no_harm_and_pass() -> None:
    """Else the claims above would hold for a validator that refuses everything."""
    sends_last = [check(MADE[0], rank, 0, "swap", 1) for rank in range(3)]
    assert sends_last == [True] * 3
