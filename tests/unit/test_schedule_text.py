"""Programs as text: it comes back, and what is no program is refused with line and column."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.programs.schedule import Action, Header, Kind, Program, Vocabulary, from_text, to_text
from braid.programs.schedule.collective import algorithm, program
from braid.programs.schedule.known import VOCABULARIES
from braid.programs.schedule.pipeline import gpipe, one_f_one_b

HEAD = "program collective ring all_reduce units 2 indices 2"
RING = f"""{HEAD}
rank 0
  send0.0>1 reduce1.0<1
  send1.1>1 recv0.1<1
rank 1
  send1.0>0 reduce0.0<0
  send0.1>0 recv1.1<0
"""
PLACE = re.compile(r"line ([1-9]\d*), column ([1-9]\d*): expected .+, got .+", re.DOTALL)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        from_text(text, VOCABULARIES)
    return str(raised.value)


def test_a_ring_on_two_ranks_reads_as_it_is_drawn() -> None:
    assert to_text(program(algorithm("ring", "all_reduce", 2))) == RING


@pytest.mark.parametrize(
    "written",
    [
        *(make(p, m) for make in (one_f_one_b, gpipe) for p, m in ((1, 1), (2, 3), (4, 8))),
        program(algorithm("tree", "scatter", 5, root=2)),
        program(algorithm("bruck", "all_to_all", 3)),
        program(algorithm("ring", "all_reduce", 1)),
    ],
    ids=str,
)
def test_a_program_comes_back_from_its_text(written: Program) -> None:
    assert from_text(to_text(written), VOCABULARIES) == written


def test_comments_and_white_space_mean_nothing() -> None:
    loose = RING.replace("\n", "  # what follows is no action: send9.9>9\r\n").replace(" ", "\t ")
    assert from_text(f"\n# a ring\n\n{loose}", VOCABULARIES) == from_text(RING, VOCABULARIES)


def test_edges_and_versions_come_back() -> None:
    kinds = {
        "w": Kind("local", "work on a version", has_version=True),
        "ask_for": Kind("send", "both", has_edge=True, has_version=True),
        "give": Kind("receive", "both", has_edge=True, has_version=True),
    }
    versions = Vocabulary("versions", kinds, "stage", "micro-batch", posts="run")
    ranks = (
        (Action("w", 0, 0, version=7), Action("ask_for", 1, 2, 1, 3, 4)),
        (Action("give", 1, 2, 0, 3, 4),),
    )
    written = Program(versions, Header("some", "thing", 1, 1, 1), ranks)
    text = (
        "program versions some thing units 1 indices 1 root 1\n"
        "rank 0\n  w0.0~7\n  ask_for1.2>1/3~4\nrank 1\n  give1.2<0/3~4\n"
    )
    assert (to_text(written), from_text(text, {"versions": versions})) == (text, written)


ACTION = "an action such as send0.0>1 (kind, unit, index, peer)"
NUMBER = "a number from 0 with at most 9 digits"
REFUSALS = {
    "": (
        "line 1, column 1: expected a program, got no text: "
        "begin with `program VOCABULARY NAME OPERATION units N indices N`"
    ),
    " \n# nothing but words\n": (
        "line 1, column 1: expected a program, got no text: "
        "begin with `program VOCABULARY NAME OPERATION units N indices N`"
    ),
    "rank 0": "line 1, column 1: expected `program`, got 'rank'",
    "program": "line 1, column 8: expected a vocabulary out of collective, pipeline, asynchronous, got the end of the line",
    "program opera": "line 1, column 9: expected a vocabulary out of collective, pipeline, asynchronous, got 'opera'",
    "program collective ring": "line 1, column 24: expected an operation, got the end of the line",
    "program collective ring all_reduce blocks 2": "line 1, column 36: expected `units`, got 'blocks'",
    "program collective ring all_reduce units 0 indices 2": (
        "line 1, column 42: expected a number from 1 with at most 9 digits, got '0'"
    ),
    "program collective ring all_reduce units 2 indices": (
        "line 1, column 51: expected a number of indices, got the end of the line"
    ),
    "program collective ring all_reduce units 2 indices 1234567890": (
        f"line 1, column 52: expected {NUMBER}, got '1234567890'"
    ),
    "program collective ring all_reduce units 2 indices -1": (
        f"line 1, column 52: expected {NUMBER}, got '-1'"
    ),
    "program collective ring all_reduce units 2 indices \u0663": (
        f"line 1, column 52: expected {NUMBER}, got '\u0663'"
    ),
    f"{HEAD} root": "line 1, column 58: expected a rank, got the end of the line",
    f"{HEAD} root x": f"line 1, column 59: expected {NUMBER}, got 'x'",
    f"{HEAD} twice": "line 1, column 54: expected `root` or the end of the line, got 'twice'",
    f"{HEAD} root 0 twice": "line 1, column 61: expected `root` or the end of the line, got 'twice'",
    HEAD: "line 1, column 52: expected `rank 0` on a line below, got '2'",
    f"{HEAD}\nsend0.0>1": "line 2, column 1: expected `rank 0`, got 'send0.0>1'",
    f"{HEAD}\nrank 1\nrank 0": "line 2, column 6: expected `rank 0`, alone in its line, got '1'",
    f"{HEAD}\nrank 0\n\nrank 0": "line 4, column 6: expected `rank 1`, alone in its line, got '0'",
    f"{HEAD}\nrank": "line 2, column 1: expected `rank 0`, alone in its line, got 'rank'",
    f"{HEAD}\nrank 0\n  jump0.0>1\nrank 1": (
        "line 3, column 3: expected a kind out of send, recv, reduce, copy, got 'jump0.0>1'"
    ),
    f"{HEAD}\nrank 0\n  send0.0 recv0.0<1\nrank 1": (
        "line 3, column 3: expected send with unit.index>peer, got 'send0.0'"
    ),
    f"{HEAD}\nrank 0\n  send0.0<1\nrank 1": (
        "line 3, column 3: expected send with unit.index>peer, got 'send0.0<1'"
    ),
    f"{HEAD}\nrank 0\n  recv0.0<1/2\nrank 1": (
        "line 3, column 3: expected recv with unit.index<peer, got 'recv0.0<1/2'"
    ),
    f"{HEAD}\nrank 0\n  copy0.0": "line 3, column 3: expected copy with unit.index/edge, got 'copy0.0'",
    f"{HEAD}\nrank 0\n  copy0.0/1~2": (
        "line 3, column 3: expected copy with unit.index/edge, got 'copy0.0/1~2'"
    ),
    f"{HEAD}\nrank 0\n  send0.0>1 send1.0>2\nrank 1": (
        "line 3, column 13: expected a peer below 2, the number of ranks here, got 'send1.0>2'"
    ),
    f"{HEAD}\nrank 0\n  send0.0>1234567890": (
        f"line 3, column 3: expected {ACTION}, got 'send0.0>1234567890'"
    ),
    f"{HEAD}\nrank 0\n  send1234567890.0>0": (
        f"line 3, column 3: expected {ACTION}, got 'send1234567890.0>0'"
    ),
    f"{HEAD}\nrank 0\n  send-1.0>0": f"line 3, column 3: expected {ACTION}, got 'send-1.0>0'",
    f"{HEAD}\nrank 0\n  send0.0>1,": f"line 3, column 3: expected {ACTION}, got 'send0.0>1,'",
    "program pipeline gpipe train units 1 indices 1\nrank 0\n  F0.0>1": (
        "line 3, column 3: expected F with unit.index, got 'F0.0>1'"
    ),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_what_is_no_program_is_refused_with_place_expected_and_got(text: str) -> None:
    assert refusal(text) == REFUSALS[text]


def test_more_ranks_than_anybody_writes_down_are_refused() -> None:
    many = "".join(f"rank {number}\n" for number in range(4097))
    assert (
        refusal(f"{HEAD}\n{many}") == "line 4098, column 1: expected at most 4096 ranks, got 'rank'"
    )


# Arbitrary text.


def refused_or_understood(text: str) -> None:
    """Either it is refused with a place, or it means what its own text means."""
    try:
        found = from_text(text, VOCABULARIES)
    except ConfigError as exc:
        message = str(exc)
    else:
        assert from_text(to_text(found), VOCABULARIES) == found
        return
    place = PLACE.fullmatch(message)
    assert place, message
    line, column = map(int, place.groups())
    rows = text.split("\n")
    assert line <= len(rows)
    assert column <= len(rows[line - 1]) + 1


PIECES = st.sampled_from(
    [
        *RING.split(),
        *("program", "pipeline", "rank", "root", "units", "#", "\n", "\n", " ", "-1", "999999999"),
        *(
            "send0.0>0",
            "copy0.0/0",
            "F0.0",
            "B0.0",
            "recv_f0.0<0",
            "send0.0>1234567890",
            "/",
            "~",
            ">",
        ),
        *("\t", "\r", "\x00", "\x85", "\u2028", "\u0663"),
    ]
)
MIXED = st.lists(PIECES | st.text(max_size=4), max_size=30)


@given(st.text(max_size=200) | MIXED.map(" ".join) | MIXED.map("".join))
@example(f"{HEAD}\nrank 0\n")
@example("program\x85collective")
def test_any_text_is_refused_with_a_place_or_understood(text: str) -> None:
    refused_or_understood(text)


@given(
    text=st.sampled_from(
        [RING, to_text(one_f_one_b(2, 2)), to_text(program(algorithm("bruck", "all_to_all", 2)))]
    ),
    start=st.integers(0, 300),
    length=st.integers(0, 12),
    inserted=PIECES | st.text(max_size=3),
)
@example(text=RING, start=0, length=0, inserted="")
def test_changed_programs_are_refused_with_a_place_or_understood(
    text: str, start: int, length: int, inserted: str
) -> None:
    at = start % (len(text) + 1)
    refused_or_understood(text[:at] + inserted + text[at + length :])


@st.composite
def any_program(draw: st.DrawFn) -> Program:
    vocabulary = draw(st.sampled_from(list(VOCABULARIES.values())))
    num_ranks = draw(st.integers(1, 4))
    number, peer = st.integers(0, 10**9 - 1), st.integers(0, num_ranks - 1)

    def action(name: str) -> st.SearchStrategy[Action]:
        kind = vocabulary.kinds[name]
        return st.builds(
            Action,
            st.just(name),
            number,
            number,
            st.just(-1) if kind.role == "local" else peer,
            number if kind.has_edge else st.just(-1),
            number if kind.has_version else st.just(-1),
        )

    actions = st.sampled_from(sorted(vocabulary.kinds)).flatmap(action)
    ranks = [tuple(draw(st.lists(actions, max_size=5))) for _ in range(num_ranks)]
    name = st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True)
    header = st.builds(Header, name, name, st.integers(1, 10**9 - 1), number, st.integers(-1, 5))
    return Program(vocabulary, draw(header), tuple(ranks))


@given(any_program())
def test_any_program_comes_back_from_its_text(written: Program) -> None:
    assert from_text(to_text(written), VOCABULARIES) == written
