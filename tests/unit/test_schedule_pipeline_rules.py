"""Each rule of pipelines has a smallest program that breaks it, and no changed program passes that an engine could not run."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule_mutation import mutated

from braid.programs.schedule import Action, Program, from_text, validate
from braid.programs.schedule.known import RULES, VOCABULARIES
from braid.programs.schedule.pipeline import SCHEDULES, gpipe, interleaved, v_half, zb_h1

FIRST = "F0.0 send_f0.0>1 recv_b0.0<1 B0.0"
LAST = "recv_f1.0<0 F1.0 B1.0 send_b1.0>0"


def pipeline(*ranks: str, operation: str = "train", stages: int = 2) -> Program:
    lines = [f"rank {number}\n{actions}" for number, actions in enumerate(ranks)]
    head = f"program pipeline mine {operation} units {stages} indices 1"
    return from_text("\n".join([head, *lines]), VOCABULARIES)


RULES_AND_LEAST_PROGRAMS = [
    ("header: the header must name train or infer", pipeline(FIRST, LAST, operation="guess")),
    ("units: rank 0, action 4: F of stage 7", pipeline(FIRST + " F7.0", LAST)),
    ("units: rank 1, action 4: W of stage 1 in micro-batch 3", pipeline(FIRST, LAST + " W1.3")),
    ("units: rank 1, action 4: F of stage 0 .* not on rank 0", pipeline(FIRST, LAST + " F0.0")),
    ("peers: rank 0, action 1: the peer must be another", pipeline("F0.0 send_f0.0>0", LAST)),
    ("work: no rank does stage 1", pipeline("F0.0 B0.0")),
    ("work: rank 0, at the end: ends without F0.0", pipeline("recv_b0.0<1 B0.0", LAST)),
    ("work: rank 0, at the end: ends without B0.0", pipeline("F0.0 send_f0.0>1", LAST)),
    ("work: rank 0, at the end: ends without I0.0", pipeline(FIRST.replace("B", "W"), LAST)),
    ("work: rank 0, at the end: ends without W0.0", pipeline(FIRST.replace("B", "I"), LAST)),
    ("work: rank 0, action 4: B .* a second time", pipeline(FIRST + " B0.0", LAST)),
    ("work: rank 0, action 4: W .* beside the same backward", pipeline(FIRST + " W0.0", LAST)),
    ("work: rank 0, action 4: I .* beside the same backward", pipeline(FIRST + " I0.0", LAST)),
    ("work: rank 0, action 2: send_f .* a second", pipeline("F0.0 send_f0.0>1 send_f0.0>1", LAST)),
    ("work: rank 1, action 2: B .* not part of a program that infers",
     pipeline("F0.0 send_f0.0>1", "recv_f1.0<0 F1.0 B1.0", operation="infer")),
    ("matching: rank 1, action 3: send_b .* has no receive", pipeline("F0.0 send_f0.0>1 B0.0", LAST)),
    ("matching: rank 1, action 0: recv_f .* has no send", pipeline("F0.0 recv_b0.0<1 B0.0", LAST)),
    ("matching: rank 0, action 1: send_f .* has no receive",
     pipeline("F0.0 send_f0.0>1 F1.0 B1.0 B0.0", "")),
    ("deadlock: rank 0, action 0: under sequential",
     pipeline("recv_b0.0<1 F0.0 send_f0.0>1 B0.0", LAST)),
    ("deadlock: rank 0, action 1: under sequential semantics no rank can continue: rank 0 waits",
     pipeline("F0.0 recv_b0.0<1 send_f0.0>1 B0.0", LAST)),
    ("data: rank 0, action 0: B .* comes before F", pipeline("B0.0 F0.0", stages=1)),
    ("data: rank 0, action 0: R .* comes before F", pipeline("R0.0 F0.0 B0.0", stages=1)),
    ("work: rank 0, action 3: R .* too late",
     pipeline("F0.0 send_f0.0>1 recv_b0.0<1 R0.0 B0.0", LAST)),
    ("work: rank 0, action 2: R .* a second time", pipeline("F0.0 R0.0 R0.0 B0.0", stages=1)),
    ("data: rank 0, action 0: I .* comes before F", pipeline("I0.0 F0.0 W0.0", stages=1)),
    ("data: rank 0, action 1: W .* comes before I", pipeline("F0.0 W0.0 I0.0", stages=1)),
    ("data: rank 0, action 0: send_f .* comes before F",
     pipeline("send_f0.0>1 F0.0 recv_b0.0<1 B0.0", LAST)),
    ("data: rank 1, action 2: send_b .* comes before I",
     pipeline(FIRST, "recv_f1.0<0 F1.0 send_b1.0>0 B1.0")),
    ("data: rank 1, action 0: F .* comes before recv_f",
     pipeline(FIRST, "F1.0 recv_f1.0<0 B1.0 send_b1.0>0")),
    ("data: rank 0, action 2: B .* comes before recv_b",
     pipeline("F0.0 send_f0.0>1 B0.0 recv_b0.0<1", LAST)),
    ("data: rank 0, action 0: F of stage 1 .* comes before F of stage 0",
     pipeline("F1.0 F0.0 B1.0 B0.0")),
    ("data: rank 1, action 0: recv_b of stage 1 .* gets what rank 0 sends with send_f",
     pipeline(FIRST, LAST.replace("recv_f", "recv_b"))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "program"), RULES_AND_LEAST_PROGRAMS)
def test_a_rule_has_a_least_program_that_breaks_it(text: str, program: Program):
    assert validate(pipeline(FIRST, LAST), RULES) == []
    with pytest.raises(ValueError, match=text):
        raise ValueError("\n".join(map(str, validate(program, RULES))))


def failure(program: Program) -> str:
    """Run a program on names of values in place of tensors, as an engine would; its failure, or ''."""
    last = program.header.num_units - 1
    left = [deque(actions) for actions in program.ranks]
    sent: dict[tuple[int, int], deque[tuple[str, int, int]]] = defaultdict(deque)
    has: list[set[tuple[str, int, int]]] = [set() for _ in left]
    done: list[tuple[str, int, int]] = []
    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(left):
            while own and not (own[0].kind.startswith("recv") and not sent[own[0].peer, rank]):
                progress = True
                problem = _step(own.popleft(), rank, last, sent, has[rank], done)
                if problem:
                    return problem
    if any(left):
        return "stuck"
    if any(sent.values()):
        return "a message is left over"
    work = {(s, i) for s in range(last + 1) for i in range(program.header.num_indices)}
    backwards = [(kind, *of) for of in work for kind in ("I", "W")]
    expected = sorted([("F", *of) for of in work] + backwards)
    return "" if sorted(done) == expected else "work is missing or done twice"


def _step(
    action: Action,
    rank: int,
    last: int,
    sent: dict[tuple[int, int], deque[tuple[str, int, int]]],
    has: set[tuple[str, int, int]],
    done: list[tuple[str, int, int]],
) -> str:
    kind, s, i = action[:3]
    needs = {
        "F": [("output", s - 1, i)] if s else [],
        "I": [("kept", s, i), *([("grad", s + 1, i)] if s < last else [])],
        "W": [("half", s, i)],
        "send_f": [("output", s, i)],
        "send_b": [("grad", s, i)],
    }
    needs["B"] = needs["I"]
    if set(needs.get(kind, [])) - has:
        return f"{kind}{s}.{i} misses its input"
    if kind.startswith("send"):
        sent[rank, action.peer].append(needs[kind][0])
    elif kind.startswith("recv"):
        value = sent[action.peer, rank].popleft()
        if value != (("output", s - 1, i) if kind == "recv_f" else ("grad", s + 1, i)):
            return f"{kind}{s}.{i} gets {value}"
        has.add(value)
    else:
        made = {"F": ["output", "kept"], "I": ["grad", "half"], "B": ["grad"], "W": []}[kind]
        has |= {(name, s, i) for name in made}
        done += [(part, s, i) for part in ("I", "W")] if kind == "B" else [(kind, s, i)]
    return ""


MADE = [gpipe(2, 2), interleaved(2, 2), zb_h1(3, 3), v_half(2, 3)]


@given(data=st.data())
def test_a_changed_pipeline_that_passes_can_be_executed(data: st.DataObject):
    program = data.draw(st.sampled_from(MADE))
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    position = data.draw(st.integers(0, len(program.ranks[rank]) - 1))
    way = data.draw(st.sampled_from(["swap", "unit", "index"]))
    number = data.draw(st.integers(0, 40))
    mutant = mutated(program, rank, position, way, number)
    assert validate(mutant, RULES) != [] or failure(mutant) == ""


@pytest.mark.parametrize("program", MADE, ids=str)
def test_no_action_of_a_pipeline_can_be_left_out_or_done_twice(program: Program):
    assert (validate(program, RULES), failure(program)) == ([], "")
    passing = [
        (rank, position, way)
        for rank, actions in enumerate(program.ranks)
        for position in range(len(actions))
        for way in ("delete", "duplicate")
        if not validate(mutated(program, rank, position, way, 0), RULES)
    ]
    assert passing == []


@pytest.mark.parametrize("program", MADE, ids=str)
def test_every_swap_that_an_engine_can_run_passes(program: Program):
    """Else the claims above would hold for a validator that refuses everything."""
    results = []
    for rank, actions in enumerate(program.ranks):
        for position in range(len(actions) - 1):
            mutant = mutated(program, rank, position, "swap", position + 1)
            results.append((not validate(mutant, RULES), not failure(mutant)))
    assert (True, True) in results
    assert (True, False) not in results


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward"])
def test_every_schedule_runs_on_names_of_values(name: str):
    assert [failure(SCHEDULES[name](p, m)) for p, m in ((1, 1), (2, 5), (4, 3), (5, 10))] == [
        ""
    ] * 4
