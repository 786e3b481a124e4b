"""Claims of braid.runtime.diagnose.verdict and block: the rank that is the cause, and the block that says so."""

from __future__ import annotations

import itertools
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.runtime.diagnose.block import (
    SavedCheckpoint,
    StopReport,
    error_block,
    rank_list,
    render_block,
)
from braid.runtime.diagnose.tracebacks import ParsedError
from braid.runtime.diagnose.verdict import MemoryKill, RankEnd, describe, judge


def raised(rank: int, text: str, *, at: int = 0, **more: object) -> RankEnd:
    kind, _, message = text.partition(": ")
    error = ParsedError(type=kind, message=message, **more)
    return RankEnd(rank=rank, pid=100 + rank, ended_ns=at, exit_code=1, error=error)


def killed(rank: int, number: int, *, at: int = 0, **more: object) -> RankEnd:
    return RankEnd(rank=rank, pid=100 + rank, ended_ns=at, signal=number, **more)


def exited(rank: int, code: int, *, at: int = 0, **more: object) -> RankEnd:
    return RankEnd(rank=rank, pid=100 + rank, ended_ns=at, exit_code=code, **more)


def verdict(*ends: RankEnd, stopped_by: str = "") -> tuple[str, list[int], bool]:
    """The verdict, which must not depend on the order of the endings."""
    verdicts = {
        (v.kind, tuple(e.rank for e in v.cause), v.certain)
        for order in itertools.permutations(ends)
        for v in [judge(order, stopped_by=stopped_by)]
    }
    ((kind, ranks, certain),) = verdicts
    return kind, list(ranks), certain


SYMPTOMS = [
    "PeerLostError: rank 1 died: killed by signal 9 (SIGKILL)",
    "CommTimeout: no progress for 300 s",
    "RuntimeError: [/pytorch/third_party/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "DistNetworkError: The client socket has timed out",
    "DistBackendError: NCCL error in: x",
    "RuntimeError: stopped because rank 1 failed",
    "CommError: stopped because rank 1 abandoned the group: rank 1 failed in layer 0",
    "CommError: an exception ended the backward of rank 1 (see there)",
]


@pytest.mark.parametrize("text", SYMPTOMS)
def test_a_symptom_is_never_blamed_while_there_is_a_cause(text):
    assert verdict(raised(0, text, at=1), killed(1, 9, at=2)) == ("signal", [1], True)


def test_the_first_ordinary_exception_is_the_cause():
    ends = (raised(0, "KeyError: 'a'", at=9), raised(2, "ValueError: b", at=4), exited(1, 0, at=2))
    assert verdict(*ends) == ("exception", [2], True)


def test_an_exception_raised_because_of_a_lost_peer_is_a_symptom():
    wrapped = raised(0, "TrainError: epoch failed", at=1, chain=("PeerLostError: rank 2 died",))
    assert verdict(wrapped, exited(2, 3, at=5)) == ("exit", [2], True)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: no such backend: gloo",
        "RuntimeError: gloo is not in the list of backends",
        "OSError: Connection refused by the licence server",
        "KeyError: 'Timed out waiting'",
    ],
)
def test_words_of_the_users_text_make_no_symptom(text):
    both = (raised(0, text, at=2), raised(1, text, at=1))
    assert verdict(*both) == ("exception", [0, 1], True)
    assert verdict(raised(0, text, at=2), raised(1, SYMPTOMS[0], at=1)) == ("exception", [0], True)


def test_a_connection_error_is_judged_by_who_raised_it():
    text = "ConnectionResetError: [Errno 104] Connection reset by peer"
    lost = raised(0, "PeerLostError: rank 1 died", at=1)
    assert verdict(lost, raised(1, text, at=2)) == ("exception", [1], True)
    in_torch = raised(1, text, at=2, raised_by="torch")
    assert verdict(raised(0, "ValueError: x", at=3), in_torch) == ("exception", [0], True)
    assert verdict(lost, in_torch)[2] is False


def test_an_error_that_was_being_handled_is_told_beside_the_code():
    error = ParsedError(type="KeyError", message="'x'")
    end = exited(1, 3, at=1, error=error, handled=True)
    assert describe(end) == "exited with code 3 while handling KeyError: 'x'"
    assert verdict(end, raised(0, "PeerLostError: rank 1 left", at=0)) == ("exit", [1], True)
    lost = ParsedError(type="PeerLostError", message="rank 1 left")
    caught = exited(0, 1, at=0, error=lost, handled=True)
    assert verdict(caught, exited(1, 3, at=1)) == ("exit", [1], True)


def test_a_rank_that_was_leaving_when_it_was_ended_is_the_cause_if_others_needed_it():
    leaving = killed(1, 15, at=1, asked_to_stop=True, departed=True)
    lost = raised(0, "PeerLostError: rank 1 has already left", at=2)
    assert verdict(leaving, lost) == ("left", [1], True)
    assert describe(leaving) == "left early, and had not ended when braid ended it"
    assert verdict(leaving, raised(0, "ValueError: x", at=2)) == ("exception", [0], True)


def test_a_doubtful_error_is_no_cause_beside_an_ordinary_one():
    own = raised(0, "ConnectionResetError: x", at=1)
    assert verdict(own, raised(1, "ValueError: y", at=2)) == ("exception", [1], True)
    said = exited(0, 3, at=1, last_line="fatal: Connection refused")
    assert verdict(said, raised(1, "PeerLostError: rank 0 left", at=2)) == ("exit", [0], True)
    assert verdict(said, raised(1, "ConnectionResetError: x", at=2)) == ("exit", [0], False)


def test_a_rank_that_exits_without_leaving_its_groups_is_the_cause_of_failures_without_errors():
    gone = exited(1, 0, at=1, unclosed=True)
    caught = exited(0, 1, at=2, last_line="fatal: it went wrong")
    assert verdict(gone, caught) == ("left", [1], True)
    assert verdict(gone, raised(0, "ValueError: x", at=2)) == ("exception", [0], True)
    assert verdict(gone, exited(0, 0, at=2)) == ("finished", [], True)
    ended = exited(1, 0, at=1, unclosed=True, asked_to_stop=True)
    lost = raised(0, "PeerLostError: rank 1 left", at=2)
    assert verdict(ended, lost, stopped_by="interrupted") == ("interrupted", [], True)


def test_abort_after_a_reset_connection_is_a_symptom():
    error = ParsedError(type="gloo::EnforceNotMet", message="Connection reset by peer")
    ends = (killed(0, signal.SIGABRT, at=1, error=error), killed(1, signal.SIGSEGV, at=2))
    assert verdict(*ends) == ("signal", [1], True)


def test_abort_of_its_own_is_a_cause():
    assert verdict(killed(0, signal.SIGABRT, at=5), raised(1, SYMPTOMS[0], at=1)) == (
        "signal",
        [0],
        True,
    )


def test_a_rank_killed_by_the_launcher_is_not_the_cause():
    ends = (killed(0, 9, at=3, asked_to_stop=True), raised(1, "ValueError: x", at=1))
    assert verdict(*ends) == ("exception", [1], True)


def test_what_a_rank_raises_after_it_was_asked_to_stop_is_no_cause():
    late = RankEnd(
        rank=0, ended_ns=3, exit_code=1, asked_to_stop=True, error=ParsedError(type="OSError")
    )
    assert verdict(late, exited(1, 3, at=5)) == ("exit", [1], True)


def test_a_mismatch_names_all_ranks_that_report_it():
    ends = (
        raised(0, "MismatchError: t", at=2),
        raised(1, "MismatchError: t", at=1),
        raised(2, "PeerLostError: rank 0 left", at=3),
    )
    assert verdict(*ends) == ("mismatch", [0, 1], True)


def test_all_ranks_with_the_same_error_are_the_cause_together():
    ends = (
        raised(0, "ConfigError: batch is 7", at=2),
        raised(1, "ConfigError: batch is 7", at=1),
        raised(2, "ConfigError: batch is 8", at=3),
        raised(3, "PeerLostError: rank 1 raised ConfigError: batch is 7", at=4),
    )
    assert verdict(*ends) == ("exception", [0, 1], True)


def test_an_abort_in_the_teardown_shares_the_error_of_the_other_ranks():
    error = ParsedError(type="ValueError", message="x")
    ends = (killed(0, signal.SIGABRT, at=1, error=error), raised(1, "ValueError: x", at=2))
    assert verdict(*ends) == ("exception", [0, 1], True)


def test_errors_whose_further_lines_differ_are_two_errors():
    ends = (
        raised(0, "CheckpointError: bad", at=1, details=("w: float32[2]",)),
        raised(1, "CheckpointError: bad", at=2, details=("w: float32[3]",)),
    )
    assert verdict(*ends) == ("exception", [0], True)


def test_programs_that_exit_with_the_same_words_are_the_cause_together():
    ends = [exited(r, 2, at=r, last_line="train.py: error: no such option") for r in (0, 1)]
    assert verdict(*ends) == ("exit", [0, 1], True)


@pytest.mark.parametrize("end", [killed, exited])
def test_the_first_of_wordless_deaths_alone_is_the_cause(end):
    ends = (end(0, 9, at=2), end(1, 9, at=1))
    assert verdict(*ends)[1:] == ([1], True)


def test_a_rank_that_left_early_and_is_missed_is_the_cause():
    ends = (exited(1, 0, at=1), raised(0, "PeerLostError: rank 1 left with exit code 0", at=2))
    assert verdict(*ends) == ("left", [1], True)


def test_a_rank_that_finished_and_is_not_missed_is_innocent():
    ends = (exited(2, 0, at=1), killed(1, 9, at=2), raised(0, "PeerLostError: rank 1 died", at=3))
    assert verdict(*ends) == ("signal", [1], True)


def test_symptoms_after_an_unnamed_early_exit_point_to_it_with_doubt():
    ends = (exited(1, 0, at=1), raised(0, SYMPTOMS[2], at=2))
    assert verdict(*ends) == ("left", [1], False)


def test_only_symptoms_name_the_earliest_with_doubt():
    ends = (raised(0, SYMPTOMS[1], at=4), raised(1, SYMPTOMS[2], at=2))
    assert verdict(*ends) == ("exception", [1], False)


def test_only_symptoms_prefer_the_one_that_others_accuse():
    ends = (
        raised(0, "PeerLostError: rank 1 raised ConnectionResetError", at=1),
        raised(1, SYMPTOMS[2], at=2),
    )
    assert verdict(*ends) == ("exception", [1], False)


def test_a_rank_declared_dead_while_stopped_is_the_cause():
    ends = (
        killed(1, 9, at=5, asked_to_stop=True, stopped_s=30.2, declared_dead=True),
        raised(0, SYMPTOMS[1], at=2),
    )
    assert verdict(*ends) == ("stopped", [1], True)


def test_a_rank_found_stopped_at_the_end_explains_symptoms():
    ends = (killed(1, 9, at=5, asked_to_stop=True, stopped_s=12), raised(0, SYMPTOMS[1], at=2))
    assert verdict(*ends) == ("stopped", [1], True)


def test_a_rank_found_stopped_at_the_end_does_not_hide_a_cause():
    ends = (killed(1, 9, at=5, asked_to_stop=True, stopped_s=1), raised(0, "KeyError: x", at=2))
    assert verdict(*ends) == ("exception", [0], True)


def test_all_zero_is_finished():
    assert verdict(exited(0, 0), exited(1, 0)) == ("finished", [], True)


@pytest.mark.parametrize("why", ["timeout", "interrupted"])
def test_a_run_stopped_from_outside_has_no_causing_rank(why):
    ends = (killed(0, 15, asked_to_stop=True), exited(1, 1, asked_to_stop=True))
    assert verdict(*ends, stopped_by=why) == (why, [], True)


ANY_END = st.builds(
    lambda rank, at, text: raised(rank, text, at=at),
    st.integers(1, 50),
    st.integers(0, 10),
    st.sampled_from(SYMPTOMS),
)


@given(st.lists(ANY_END, max_size=6), st.integers(0, 10), st.sampled_from([0, 1, 2, 3]))
def test_one_cause_among_any_symptoms_is_found(symptoms, at, kind):
    cause = [
        killed(0, 9, at=at),
        raised(0, "ValueError: x", at=at),
        exited(0, 7, at=at),
        killed(0, 9, at=at, asked_to_stop=True, stopped_s=30, declared_dead=True),
    ][kind]
    assert judge([*symptoms, cause]).cause == (cause,)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (killed(0, 9), "killed by signal 9 (SIGKILL)"),
        (exited(0, 3), "exited with code 3"),
        (exited(0, 137), "exited with code 137 (128 + 9, SIGKILL)"),
        (exited(0, 0), "left early with exit code 0"),
        (raised(0, "ValueError: x"), "raised ValueError: x"),
        (
            killed(0, 9, stopped_s=30, asked_to_stop=True),
            "stopped by SIGSTOP for 30 s, killed by braid",
        ),
        (
            killed(0, 9, memory_kill=MemoryKill(512_000_000, 511_000_000)),
            "killed by the kernel for memory (cgroup limit 512 MB, peak 511 MB)",
        ),
        (
            killed(0, 6, error=ParsedError(type="ValueError", message="x")),
            "aborted after ValueError: x",
        ),
        (killed(0, 9, memory_kill=MemoryKill()), "killed by the kernel for memory"),
    ],
)
def test_endings_in_words(end, words):
    assert describe(end) == words


WAITING = "waiting in all_reduce(float32[300000], sum)#426 called at train.py:41 in step"

GOLDEN = """\
braid: run stopped at step 213 after 41 s (exit 1)
  cause    rank 1 on host b (pid 812): ValueError: dataset file shard-7 is missing      train.py:57 in load_shard
  affected ranks 0,2,3 were waiting in all_reduce(float32[300000], sum)#426 called at train.py:41 in step - stopped cleanly
  saved    checkpoint step 200 (sha256 ok), 13 steps not saved
  resume   braid run --resume auto -n 4 train.py
  logs     ./runs/2026-11-20_a3f/rank1.log   timeline: braid report ./runs/2026-11-20_a3f"""


def test_the_block_of_a_bad_run():
    cause = RankEnd(
        rank=1,
        pid=812,
        host="b",
        ended_ns=1,
        exit_code=1,
        error=ParsedError(
            type="ValueError",
            message="dataset file shard-7 is missing",
            where="train.py:57 in load_shard",
        ),
    )
    others = [
        RankEnd(
            rank=rank,
            ended_ns=2,
            exit_code=1,
            last_events=WAITING,
            error=ParsedError(type="PeerLostError", message="rank 1 died"),
        )
        for rank in (0, 2, 3)
    ]
    report = StopReport(
        verdict=judge([cause, *others]),
        exit_code=1,
        elapsed_s=41.2,
        step=213,
        saved=SavedCheckpoint(200, "ckpt/200", sha256_ok=True),
        resume="braid run --resume auto -n 4 train.py",
        log_dir="./runs/2026-11-20_a3f",
        has_timeline=True,
    )
    assert render_block(error_block(report)) == GOLDEN


GOLDEN_TIMEOUT = """\
braid: run timed out at step 88 after 60 s (limit 60 s, exit 124)
  affected ranks 0,2 were waiting in barrier()#7, at step 88 - ended by braid (SIGTERM)
           rank 1 was in data, at step 88 - did not stop when asked, killed by braid
  logs     ./runs/x/"""


def test_the_block_of_a_time_out_says_who_was_doing_what():
    ends = [
        killed(r, 15, asked_to_stop=True, last_events="waiting in barrier()#7, at step 88")
        for r in (0, 2)
    ]
    ends.append(killed(1, 9, asked_to_stop=True, last_events="in data, at step 88"))
    report = StopReport(
        verdict=judge(ends, stopped_by="timeout"),
        exit_code=124,
        elapsed_s=60.0,
        step=88,
        log_dir="./runs/x",
        limit_s=60.0,
    )
    assert render_block(error_block(report)) == GOLDEN_TIMEOUT


def test_a_time_out_says_whose_stacks_could_not_be_had():
    ends = [killed(r, 15, asked_to_stop=True) for r in (0, 1)]
    ends += [killed(2, 15, asked_to_stop=True, last_events="at train.py:5 in wait"), exited(3, 0)]
    report = StopReport(
        verdict=judge(ends, stopped_by="timeout"), exit_code=124, elapsed_s=60.0, limit_s=60.0
    )
    assert render_block(error_block(report)) == (
        "braid: run timed out after 60 s (limit 60 s, exit 124)\n"
        "  affected ranks 0,1 ended by braid (SIGTERM)\n"
        "           rank 2 was at train.py:5 in wait - ended by braid (SIGTERM)\n"
        "           rank 3 finished\n"
        "           no stack of ranks 0,1: stacks need braid.init() in the program"
    )


def test_what_the_causing_rank_was_in_stands_apart_from_a_message():
    ends = [
        replace(raised(0, "CheckpointError: no room left."), last_events="after step 20"),
        killed(0, 9, last_events="in backward, at step 20"),
    ]
    rows = [error_block(StopReport(verdict=judge([e]), exit_code=1, elapsed_s=1)) for e in ends]
    assert [row[1] for row in rows] == [
        ("cause", "rank 0 (pid 100): CheckpointError: no room left.      after step 20"),
        ("cause", "rank 0 (pid 100): killed by signal 9 (SIGKILL) in backward, at step 20"),
    ]


def test_details_and_doubt_stand_below_the_causing_rank():
    end = raised(3, "CommTimeout: 2 of 4 arrived", details=("missing: 1, 2",))
    report = StopReport(verdict=judge([end]), exit_code=1, elapsed_s=2.34)
    assert render_block(error_block(report)) == (
        "braid: run stopped after 2.3 s (exit 1)\n"
        "  cause    rank 3 (pid 103): CommTimeout: 2 of 4 arrived\n"
        "           missing: 1, 2\n"
        "           uncertain: every rank failed because of another one; this is the likeliest"
    )


def test_an_error_of_several_ranks_is_shown_once():
    ends = [
        raised(r, "CheckpointError: truncated", where="train.py:9 in load", details=("file a",))
        for r in (0, 1)
    ]
    report = StopReport(verdict=judge(ends), exit_code=1, elapsed_s=1, log_dir="./runs/x")
    assert render_block(error_block(report)) == (
        "braid: run stopped after 1.0 s (exit 1)\n"
        "  cause    ranks 0,1: CheckpointError: truncated      train.py:9 in load\n"
        "           file a\n"
        "  logs     ./runs/x/"
    )


def test_victims_without_events_are_shown_at_the_line_of_their_error():
    ends = [raised(r, SYMPTOMS[2], at=2, where="train.py:9 in step") for r in (0, 2)]
    report = StopReport(verdict=judge([*ends, killed(1, 9, at=1)]), exit_code=137, elapsed_s=1)
    assert render_block(error_block(report)) == (
        "braid: run stopped after 1.0 s (exit 137)\n"
        "  cause    rank 1 (pid 101): killed by signal 9 (SIGKILL)\n"
        "  affected ranks 0,2 were at train.py:9 in step - stopped cleanly"
    )


def test_an_abort_in_the_teardown_of_an_exception_is_that_exception():
    error = ParsedError(type="ValueError", message="x")
    ends = (killed(0, signal.SIGABRT, at=1, error=error), raised(1, SYMPTOMS[2], at=2))
    assert verdict(*ends) == ("exception", [0], True)


def test_the_last_words_stand_for_an_error_of_a_program_without_traceback():
    ends = (
        exited(0, 1, at=1, last_line="Connection reset by peer"),
        exited(1, 2, at=2, last_line="train.py: error: no such option"),
    )
    report = StopReport(verdict=judge(ends), exit_code=2, elapsed_s=1)
    assert render_block(error_block(report)) == (
        "braid: run stopped after 1.0 s (exit 2)\n"
        "  cause    rank 1 (pid 101): exited with code 2\n"
        "           train.py: error: no such option\n"
        "  affected rank 0 also failed: exited with code 1"
    )


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([1], "rank 1"), ([3, 0, 2], "ranks 0,2,3"), (range(16), "ranks 0-15")],
)
def test_ranks_are_listed_shortly(ranks, text):
    assert rank_list(ranks) == text


def test_a_broken_link_is_the_cause_where_no_rank_is():
    ends = [raised(r, f"PeerLostError: rank {1 - r} cannot be reached", at=r) for r in (0, 1)]
    report = StopReport(
        verdict=judge(ends),
        exit_code=1,
        elapsed_s=35.0,
        log_dir="runs/1",
        links=("hosts a and b have received nothing from each other for 19 s",),
    )
    assert error_block(report)[1:] == [
        ("cause", "hosts a and b have received nothing from each other for 19 s"),
        ("affected", "ranks 0,1 stopped cleanly"),
        ("logs", "runs/1/"),
    ]


def test_an_error_of_the_program_with_the_name_of_braids_is_a_cause():
    own = raised(1, "PeerLostError: shard-7 is missing", at=1, module="__main__")
    other = raised(0, "PeerLostError: rank 1 raised PeerLostError", at=2, module="braid.errors")
    assert verdict(own, other) == ("exception", [1], True)


def test_codes_in_the_text_of_an_error_do_not_reach_the_terminal():
    end = raised(1, "ValueError: \x1b[2Jgone", details=("a\x07b",), where="\x1b[1mx.py:1")
    report = StopReport(verdict=judge([end]), exit_code=1, elapsed_s=1.0)
    assert render_block(error_block(report)).split("\n")[1:] == [
        "  cause    rank 1 (pid 101): ValueError: gone      x.py:1",
        "           a\\x07b",
    ]


def test_a_rank_that_stood_still_for_long_is_the_cause_among_symptoms():
    lost = "PeerLostError: lost server 0: it closed the connection"
    ends = [
        replace(raised(0, lost, at=9), paused_s=40.0),
        replace(raised(1, lost, at=8), paused_s=2.0),
    ]
    assert verdict(*ends) == ("exception", [0], True)
    report = StopReport(verdict=judge(ends), exit_code=1, elapsed_s=60.0)
    _, (_, cause), (_, affected) = error_block(report)
    assert cause.startswith(
        "rank 0 (pid 100), which had been stopped by SIGSTOP for 40 s: PeerLost"
    )
    assert affected == "rank 1 stopped cleanly, had been stopped by SIGSTOP for 2.0 s"


def test_a_rank_that_stood_still_is_not_blamed_for_the_error_of_another():
    ends = [replace(raised(0, SYMPTOMS[0], at=1), paused_s=40.0), raised(1, "ValueError: x", at=9)]
    assert verdict(*ends) == ("exception", [1], True)
