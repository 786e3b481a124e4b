"""Each rule of the validator, with a smallest program that breaks it, and the words in which it says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from braid.errors import ConfigError
from braid.programs.schedule import Action, Program, from_text, match, order, validate
from braid.programs.schedule.known import RULES, VOCABULARIES
from braid.programs.schedule.matching import Moment, Place
from braid.programs.schedule.pipeline import gpipe, one_f_one_b

BOTH = ("rendezvous", "buffered")


def collective(operation: str, num_blocks: int, *ranks: str, root: int = -1) -> Program:
    """A program from the actions of every rank."""
    rooted = f" root {root}" if root >= 0 else ""
    lines = [f"rank {number}\n{actions}" for number, actions in enumerate(ranks)]
    head = f"program collective mine {operation} units {num_blocks} indices 9{rooted}"
    return from_text("\n".join([head, *lines]), VOCABULARIES)


def pipeline(num_microbatches: int, *ranks: str) -> Program:
    lines = [f"rank {number}\n{actions}" for number, actions in enumerate(ranks)]
    head = f"program pipeline mine train units {len(ranks)} indices {num_microbatches}"
    return from_text("\n".join([head, *lines]), VOCABULARIES)


def wrong(written: Program, semantics: tuple[str, ...] = BOTH) -> list[str]:
    return [str(found) for found in validate(written, RULES, semantics=semantics)]


# Two ranks exchange their buffers and add them up: right, and the measure for all that follows.
EXCHANGE = ("send0.0>1 reduce0.0<1", "send0.0>0 reduce0.0<0")


def test_an_exchange_is_valid() -> None:
    assert wrong(collective("all_reduce", 1, *EXCHANGE)) == []


# peers


def test_a_peer_that_is_not_there_or_oneself_is_said_with_those_that_are() -> None:
    written = collective("all_reduce", 1, *EXCHANGE)
    ranks = ((Action("send", 0, 0, 2), Action("send", 0, 0, -1)), (Action("recv", 0, 0, 1),))
    assert wrong(written._replace(ranks=ranks)) == [
        "peers: rank 0, action 0: the peer must be another rank from 0 to 1, got 2",
        "peers: rank 0, action 1: the peer must be another rank from 0 to 1, got -1",
        "peers: rank 1, action 0: the peer must be another rank from 0 to 1, got 1",
    ]


# units


def test_blocks_that_the_buffer_does_not_have_are_said() -> None:
    written = collective("all_reduce", 2, "send2.0>1 copy0.1/7", "reduce1.0<0")
    assert wrong(written) == [
        "units: rank 0, action 0: block 2 does not exist: blocks are numbered from 0 to 1",
        "units: rank 0, action 1: block 7 does not exist: blocks are numbered from 0 to 1",
    ]


# matching


def test_messages_without_another_end_are_said_all_of_them() -> None:
    written = collective(
        "all_reduce", 1, "send0.0>1 send0.1>1 recv0.2<2", "reduce0.0<0", "send0.5>1"
    )
    assert wrong(written) == [
        "matching: rank 0, action 1: send of block 0 in round 1 to rank 1 has no receive there",
        "matching: rank 0, action 2: recv of block 0 in round 2 from rank 2 has no send there",
        "matching: rank 2, action 0: send of block 0 in round 5 to rank 1 has no receive there",
    ]


def test_the_first_message_is_for_the_first_receive_whatever_the_rounds_say() -> None:
    written = collective("all_reduce", 1, "send0.3>1 send0.4>1", "recv0.0<0 reduce0.7<0")
    pairs = {Place(0, 0): Place(1, 0), Place(0, 1): Place(1, 1)}
    assert match(written) == (pairs | {there: here for here, there in pairs.items()}, [])


# deadlock

ONE_AFTER_THE_OTHER = ("send0.0>1 reduce0.1<1", "send0.0>0 reduce0.1<0")
RECEIVE_FIRST = ("reduce0.0<1 send0.1>1", "reduce0.0<0 send0.1>0")


def test_sending_before_receiving_deadlocks_where_messages_have_no_memory() -> None:
    assert wrong(collective("all_reduce", 1, *ONE_AFTER_THE_OTHER)) == [
        (
            "deadlock: rank 0, action 0: under rendezvous semantics no rank can continue: "
            "rank 0 waits in send of block 0 in round 0 to rank 1 for action 1 there; "
            "rank 1 waits in send of block 0 in round 0 to rank 0 for action 1 there"
        )
    ]


def test_sending_before_receiving_is_valid_where_messages_have_memory() -> None:
    assert wrong(collective("all_reduce", 1, *ONE_AFTER_THE_OTHER), ("buffered",)) == []


@pytest.mark.parametrize("semantics", BOTH)
def test_receiving_before_sending_deadlocks_in_any_case(semantics: str) -> None:
    assert wrong(collective("all_reduce", 1, *RECEIVE_FIRST), (semantics,)) == [
        (
            f"deadlock: rank 0, action 0: under {semantics} semantics no rank can continue: "
            "rank 0 waits in reduce of block 0 in round 0 from rank 1 for action 1 there; "
            "rank 1 waits in reduce of block 0 in round 0 from rank 0 for action 1 there"
        )
    ]


def test_the_circle_names_only_those_who_wait_for_each_other() -> None:
    """Rank 0 waits for the circle of ranks 1, 2 and 3, but is no part of it."""
    written = collective(
        "all_reduce",
        1,
        "recv0.0<1",
        "recv0.0<3 send0.1>2 send0.2>0",
        "recv0.0<1 send0.1>3",
        "recv0.0<2 send0.1>1",
    )
    matching = match(written)
    moments, deadlock = order(written, matching, buffered=True)
    assert deadlock is not None
    assert [place.rank for place in deadlock.circle] == [1, 3, 2]
    assert moments == [Moment(rank, range(1), ended=False) for rank in range(4)]


def test_what_is_posted_together_does_not_wait_for_each_other() -> None:
    written = collective("all_reduce", 1, *EXCHANGE)
    assert order(written, match(written), buffered=False) == (
        [
            Moment(0, range(2), ended=False),
            Moment(1, range(2), ended=False),
            Moment(0, range(2), ended=True),
            Moment(1, range(2), ended=True),
        ],
        None,
    )


# contributions


def test_a_contribution_that_is_added_twice_is_said_with_its_rank() -> None:
    written = collective("reduce", 1, "reduce0.0<1 reduce0.1<1", "send0.0>0 send0.1>0", root=0)
    assert wrong(written) == [
        (
            "contributions: rank 0, action 1: reduce of block 0 in round 1 from rank 1: "
            "counts the contribution of rank 1 twice"
        )
    ]


def test_a_contribution_that_is_lost_is_said_at_the_end() -> None:
    written = collective("reduce", 1, "reduce0.0<1", "send0.0>0", "", root=0)
    assert wrong(written) == [
        "contributions: rank 0, at the end: block 0 ends without the contribution of rank 2"
    ]


def test_a_sum_that_is_replaced_is_missing_at_the_end() -> None:
    written = collective("reduce", 1, "recv0.0<1", "send0.0>0", root=0)
    assert wrong(written) == [
        "contributions: rank 0, at the end: block 0 ends without the contribution of rank 0"
    ]


def test_adding_one_block_to_another_is_said() -> None:
    written = collective("reduce", 2, "reduce0.0<1 reduce1.1<1", "send1.0>0 send0.1>0", root=0)
    assert wrong(written) == [
        "contributions: rank 0, action 0: reduce of block 0 in round 0 from rank 1: adds block 1 to block 0",
        "contributions: rank 0, action 1: reduce of block 1 in round 1 from rank 1: adds block 0 to block 1",
    ]


def test_sending_what_holds_nothing_is_said_where_it_is_sent() -> None:
    written = collective("broadcast", 1, "recv0.0<1", "send0.0>0", root=0)
    assert wrong(written) == [
        "contributions: rank 1, action 0: send of block 0 in round 0 to rank 0: it holds nothing yet"
    ]


def test_copying_what_holds_nothing_is_said() -> None:
    written = collective("all_to_all", 2, "copy1.0/1")
    assert wrong(written) == [
        "contributions: rank 0, action 0: copy of block 1 in round 0: it holds nothing yet"
    ]


def test_adding_to_nothing_is_said() -> None:
    written = collective("gather", 2, "reduce1.0<1", "send1.0>0", root=0)
    assert wrong(written) == [
        "contributions: rank 0, action 0: reduce of block 1 in round 0 from rank 1: there is nothing yet to add to"
    ]


def test_a_block_at_the_wrong_place_is_missing_at_the_right_one() -> None:
    written = collective("gather", 2, "recv0.0<1", "send1.0>0", root=0)
    assert wrong(written) == [
        "contributions: rank 0, at the end: block 0 ends without block 0 of rank 0",
        "contributions: rank 0, at the end: block 1 ends without block 1 of rank 1",
    ]


def test_what_is_sent_is_what_was_there_before_the_round() -> None:
    """Both add what the other had, not what it has become."""
    assert wrong(collective("all_reduce", 1, *EXCHANGE)) == []
    late = collective("all_reduce", 1, "send0.0>1 reduce0.1<1", "reduce0.0<0 send0.1>0")
    assert wrong(late) == [
        (
            "contributions: rank 0, action 1: reduce of block 0 in round 1 from rank 1: "
            "counts the contribution of rank 0 twice"
        )
    ]


def test_no_more_is_said_than_anybody_reads() -> None:
    ranks = ["" for _ in range(30)]
    assert len(wrong(collective("all_reduce", 1, *ranks))) == 20


# pipelines

GOOD = ("F0.0 send_f0.0>1 recv_b0.0<1 B0.0", "recv_f1.0<0 F1.0 B1.0 send_b1.0>0")


def test_the_smallest_pipelines_are_valid() -> None:
    assert (wrong(pipeline(1, "F0.0 B0.0")), wrong(pipeline(1, *GOOD))) == ([], [])


@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
def test_pipelines_are_valid_for_any_stages_and_micro_batches(
    make: Callable[[int, int], Program],
) -> None:
    found = {(p, m): wrong(make(p, m)) for p in range(1, 7) for m in range(1, 9)}
    assert found == {key: [] for key in found}


def test_work_twice_on_another_stage_or_beyond_the_micro_batches_is_said() -> None:
    beyond = "is not of a stage below 1 and a micro-batch below 1"
    assert wrong(pipeline(1, "F0.0 F0.0 F1.0 F0.5 B0.0")) == [
        "work: rank 0, action 1: F of stage 0 in micro-batch 0 a second time",
        f"units: rank 0, action 2: F of stage 1 in micro-batch 0 {beyond}",
        f"units: rank 0, action 3: F of stage 0 in micro-batch 5 {beyond}",
    ]


def test_a_stage_on_two_ranks_and_one_on_none_are_said() -> None:
    twice = "F0.0 B0.0", "F0.0 B0.0"
    assert wrong(pipeline(1, *twice)) == [
        "units: rank 1, action 0: F of stage 0 in micro-batch 0 is not on rank 0, which has that stage",
        "units: rank 1, action 1: B of stage 0 in micro-batch 0 is not on rank 0, which has that stage",
        "work: no rank does stage 1",
    ]


SPLIT = "F0.0 send_f0.0>1 recv_b0.0<1 I0.0 W0.0", "recv_f1.0<0 F1.0 I1.0 send_b1.0>0 W1.0"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (SPLIT, ""),
        (("F0.0 send_f0.0>1 recv_b0.0<1 I0.0", SPLIT[1]), "work: rank 0, at the end: ends without W0.0"),
        (("F0.0 send_f0.0>1 recv_b0.0<1 W0.0 I0.0", SPLIT[1]), "W of stage 0 in micro-batch 0 comes before I"),
        (("F0.0 send_f0.0>1 recv_b0.0<1 I0.0 W0.0 B0.0", SPLIT[1]), "beside the same backward in another form"),
        (("F0.0 send_f0.0>1 recv_b0.0<1 I0.0 W0.0", "recv_f1.0<0 F1.0 send_b1.0>0 I1.0 W1.0"),
         "send_b of stage 1 in micro-batch 0 to rank 0 comes before I"),
    ],
)  # fmt: skip
def test_a_backward_may_be_split_into_input_and_weights(ranks: tuple[str, ...], text: str) -> None:
    found = wrong(pipeline(1, *ranks))
    assert (found == []) if not text else (len(found) == 1 and text in found[0])


def test_stages_that_follow_on_one_rank_need_no_message() -> None:
    head = "program pipeline mine train units 2 indices 1\nrank 0\n"
    assert wrong(from_text(head + "F0.0 F1.0 B1.0 B0.0", VOCABULARIES)) == []
    early = wrong(from_text(head + "F0.0 F1.0 B0.0 B1.0", VOCABULARIES))
    assert early == [
        "data: rank 0, action 2: B of stage 0 in micro-batch 0 comes before I of stage 1"
    ]


def test_a_program_that_infers_has_forwards_only() -> None:
    head = "program pipeline mine infer units 1 indices 1\nrank 0\n"
    assert wrong(from_text(head + "F0.0", VOCABULARIES)) == []
    assert (
        "is not part of a program that infers"
        in wrong(from_text(head + "F0.0 B0.0", VOCABULARIES))[0]
    )


def test_work_that_is_not_done_is_said() -> None:
    assert wrong(pipeline(2, "F0.0 F0.1 B0.1")) == ["work: rank 0, at the end: ends without B0.0"]


def test_work_before_what_it_needs_is_said() -> None:
    assert wrong(pipeline(1, "B0.0 F0.0")) == [
        "data: rank 0, action 0: B of stage 0 in micro-batch 0 comes before F of micro-batch 0"
    ]
    early = "F1.0 B1.0 recv_f1.0<0 send_b1.0>0"
    assert wrong(pipeline(1, GOOD[0], early)) == [
        "data: rank 1, action 0: F of stage 1 in micro-batch 0 comes before recv_f of micro-batch 0"
    ]
    hasty = "F0.0 send_f0.0>1 B0.0 recv_b0.0<1"
    assert wrong(pipeline(1, hasty, GOOD[1])) == [
        "data: rank 0, action 2: B of stage 0 in micro-batch 0 comes before recv_b of micro-batch 0"
    ]


def test_sending_before_it_is_made_is_said() -> None:
    assert wrong(pipeline(1, "send_f0.0>1 F0.0 recv_b0.0<1 B0.0", GOOD[1])) == [
        "data: rank 0, action 0: send_f of stage 0 in micro-batch 0 to rank 1 comes before F of micro-batch 0"
    ]


def test_a_pipeline_whose_ranks_wait_for_each_other_is_said_as_the_circle() -> None:
    """The first stage wants the gradient before it hands on what it is the gradient of."""
    first = "F0.0 recv_b0.0<1 send_f0.0>1 B0.0"
    apart = "F0.0 recv_b0.0<1 F0.1 send_f0.0>1 B0.0 send_f0.1>1 recv_b0.1<1 B0.1"
    second = "recv_f1.0<0 F1.0 B1.0 send_b1.0>0 recv_f1.1<0 F1.1 B1.1 send_b1.1>0"
    assert (
        wrong(pipeline(1, first, GOOD[1])) == []
    )  # messages beside each other are posted together
    assert wrong(pipeline(2, apart, second)) == [
        (
            "deadlock: rank 0, action 1: under rendezvous semantics no rank can continue: "
            "rank 0 waits in recv_b of stage 0 in micro-batch 0 from rank 1 for action 3 there; "
            "rank 1 waits in recv_f of stage 1 in micro-batch 0 from rank 0 for action 3 there"
        )
    ]


MISTAKEN = {
    "micro-batches change places": (
        "F0.0 F0.1 send_f0.1>1 send_f0.0>1 recv_b0.0<1 B0.0 recv_b0.1<1 B0.1",
        "recv_f1.0<0 recv_f1.1<0 F1.0 F1.1 B1.0 send_b1.0>0 B1.1 send_b1.1>0",
    ),
    "an output taken for a gradient": (
        "F0.0 F0.1 send_f0.0>1 send_f0.1>1 recv_b0.0<1 B0.0 recv_b0.1<1 B0.1",
        "recv_f1.0<0 F1.0 recv_f1.1<0 F1.1 send_f1.0>0 send_f1.1>0 B1.0 B1.1",
    ),
    "from a stage that is no neighbour": (
        "F0.0 send_f0.0>1 send_f0.0>2 recv_b0.0<2 B0.0 F0.1 send_f0.1>1 send_f0.1>2 recv_b0.1<2 B0.1",
        "recv_f1.0<0 F1.0 recv_b1.0<2 B1.0 recv_f1.1<0 F1.1 recv_b1.1<2 B1.1",
        "recv_f2.0<0 F2.0 B2.0 send_b2.0>0 send_b2.0>1 recv_f2.1<0 F2.1 B2.1 send_b2.1>0 send_b2.1>1",
    ),
}


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (
            "x dance units 1 indices 1",
            "header: unknown operation 'dance': choose one of all_reduce, reduce,",
        ),
        (
            "x broadcast units 1 indices 1 root 5",
            "header: broadcast needs a root from 0 to 0, got 5",
        ),
        (
            "x broadcast units 1 indices 1",
            "header: broadcast needs a root from 0 to 0, got none",
        ),
        (
            "x all_reduce units 1 indices 1 root 0",
            "header: all_reduce needs no root, got 0",
        ),
        (
            "x gather units 7 indices 1 root 0",
            "header: gather on 1 ranks needs 1 blocks, got",
        ),
        (
            "x all_reduce units 999999999 indices 0",
            "size: a program may have at most 1048576 ranks x units",
        ),
    ],
)
def test_headers_that_no_program_can_have_are_said(head: str, text: str) -> None:
    found = wrong(from_text(f"program collective {head}\nrank 0\n", VOCABULARIES))
    assert (len(found), found[0][: len(text)]) == (1, text)


def test_pipelines_of_another_size_than_their_ranks_are_said() -> None:
    text = "program pipeline x dance units 5 indices 0 root 7\nrank 0\nrank 1\n"
    found = wrong(from_text(text, VOCABULARIES))
    assert found[0].startswith("header: the header must name train or infer and no root")


def test_rounds_that_the_header_does_not_count_are_said() -> None:
    text = "program collective x all_reduce units 1 indices 1\nrank 0\n copy0.77/0\n"
    assert wrong(from_text(text, VOCABULARIES)) == [
        "units: rank 0, action 0: round 77 does not exist: rounds are numbered from 0 to 0"
    ]


def test_semantics_that_there_are_not_are_refused() -> None:
    written = collective("all_reduce", 1, *EXCHANGE)
    for semantics in ((), ("bufferd",)):
        with pytest.raises(ConfigError, match="must be some of rendezvous, buffered"):
            validate(written, RULES, semantics=semantics)


@pytest.mark.parametrize("name", MISTAKEN)
def test_a_message_that_brings_something_else_than_is_received_is_said(name: str) -> None:
    assert wrong(pipeline(2, *MISTAKEN[name])) != []
