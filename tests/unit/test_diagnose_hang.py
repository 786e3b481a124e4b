"""Claims of braid.runtime.diagnose.hang: who waits, who is missing, and why, from what is seen of the ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.runtime.diagnose.hang import find_hang
from braid.runtime.diagnose.hang_causes import ADVICE
from braid.runtime.diagnose.hang_stack import parse_threads, waits_for_peers
from braid.runtime.diagnose.hang_view import LinkView, Process, RankView, SpanView
from braid.runtime.diagnose.tracebacks import BRAID_ROOT
from braid.runtime.events import OPEN

S = 1_000_000_000
NOW, LIMIT = 100 * S, 10 * S
WORLD, OTHER = 0xA, 0xB
REDUCE = "all_reduce(float32[4096], sum)"
SLEEPS, RUNS = Process("S", 0.0), Process("R", 0.98)
TORCH = "/opt/python/lib/python3.11/site-packages/torch/utils/data/dataloader.py"


def dump(*frames: str) -> str:
    """What faulthandler writes, for the innermost frame first: `file:line in function`."""
    lines = ["Current thread 0x00007f1 (most recent call first):"]
    for frame in frames:
        place, _, function = frame.partition(" in ")
        file, _, line = place.rpartition(":")
        lines.append(f'  File "{file}", line {line} in {function}')
    return "\n".join(lines)


WAITS = dump(
    f"{BRAID_ROOT}/runtime/transport/wait.py:180 in until",
    f"{BRAID_ROOT}/comm/progress.py:90 in _wait",
    "/home/me/train.py:41 in step",
)
IN_USERS_CODE = dump("/home/me/train.py:60 in finish", "/home/me/train.py:70 in <module>")
IN_LOADER = dump(
    "/opt/python/lib/python3.11/threading.py:320 in wait",
    f"{TORCH}:708 in __next__",
    "/home/me/train.py:38 in main",
)


def operation(
    seq: int, t_s: float, dur_s: float | None = None, *, group: int = WORLD, **more: object
) -> SpanView:
    facts = {"name": REDUCE, "channel": 0, "site": "/home/me/train.py:41 in step", **more}
    return SpanView(
        t_ns=round(t_s * S),
        dur_ns=OPEN if dur_s is None else round(dur_s * S),
        group=group,
        seq=seq,
        **facts,
    )


def span(name: str, t_s: float, dur_s: float | None = None, seq: int = 0) -> SpanView:
    return SpanView(name, round(t_s * S), OPEN if dur_s is None else round(dur_s * S), seq=seq)


def waiting(rank: int, *before: SpanView, t_s: float = 89.8, **more: object) -> RankView:
    """A rank that waits in all_reduce#176."""
    last = operation(176, t_s, **more)
    return RankView(rank, 810 + rank, (operation(175, 80, 1), *before, last), SLEEPS, WAITS)


def late(
    *after: SpanView, process: Process = SLEEPS, stack: str = IN_USERS_CODE, ended: str = ""
) -> RankView:
    """Rank 1, which has ended all_reduce#175."""
    return RankView(1, 811, (operation(175, 80, 1), *after), process, stack, ended)


def report(*views: RankView, now_ns: int = NOW):
    return find_hang(views, now_ns=now_ns, limit_ns=LIMIT)


def test_the_block_says_who_waits_who_is_missing_and_why():
    steps = [span("step", 70, 11.5, 87), span("step", 85, None, 88)]
    late_one = late(span("step", 70, 19.9, 87), stack=IN_LOADER)
    found = report(waiting(0, *steps), late_one, waiting(2, *steps), waiting(3, *steps))
    assert str(found) == (
        "braid: no progress for 10.2 s at step 88\n"
        "  waiting  ranks 0,2,3  all_reduce#176  float32[4096], sum   train.py:41 in step\n"
        "  missing  rank 1 (pid 811)   in DataLoader.__next__  train.py:38 in main   cpu 0 %, sleeping\n"
        "           last seen 10.1 s ago, as it ended step 87\n"
        "  likely   rank 1 waits for its data, its last step was 87, rank 0 is in step 88\n"
        f"           -> {ADVICE['data']}"
    )


@pytest.mark.parametrize(
    ("view", "kind", "text"),
    [
        (late(ended="exited with code 0"), "left", "is gone: it exited with code 0"),
        (late(process=Process("T"), stack=""), "stopped", "is stopped (state T)"),
        (
            late(process=Process("D", 0.0, 900 << 20, 100 << 20, 300.0), stack=""),
            "swapped",
            "is swapped out: 944 MB, 300 major faults/s",
        ),
        (late(process=Process("D")), "io", "is blocked in the kernel (state D) at train.py:60 in finish"),
        (late(stack=IN_LOADER), "data", "waits for its data"),
        (late(span("data", 81)), "data", "waits for its data"),
        (
            late(span("step", 79.5, 2, 43)),
            "batches",
            "has run out of batches: its last step was 43, rank 0 is in step 44",
        ),
        (
            late(stack=dump(f"{BRAID_ROOT}/context.py:70 in shutdown")),
            "batches",
            "is at the end of its program",
        ),
        (late(process=RUNS), "busy", "computes at train.py:60 in finish (cpu 98 %) and has not come back"),
        (
            late(process=Process("R", 0.12, delayed_share=0.8)),
            "busy",
            "computes at train.py:60 in finish (cpu 12 %) and has not come back",
        ),
        (late(span("checkpoint", 82)), "phase", "is still in checkpoint"),
        (
            late(),
            "elsewhere",
            "is at train.py:60 in finish: in a call that has not returned (it may hold the interpreter's lock)",
        ),
        (
            late(stack=dump("/opt/python/lib/python3.11/queue.py:171 in get", "/home/me/a.py:3 in f")),
            "elsewhere",
            "is in queue.get, called at a.py:3 in f, not in that operation",
        ),
        (late(stack=""), "unseen", "is missing, and gives no stack"),
        (
            late(stack=dump("/opt/python/lib/python3.11/threading.py:1590 in _shutdown")),
            "batches",
            "is at the end of its program",
        ),
        (
            late(stack=dump("/opt/python/lib/python3.11/subprocess.py:9 in poll")),
            "elsewhere",
            "is in subprocess.poll, called by no line of the program",
        ),
    ],
)  # fmt: skip
def test_each_cause_is_told_from_the_others(view, kind, text):
    found = report(waiting(0, span("step", 85, None, 44)), view)
    assert found is not None
    (cause,) = found.causes
    assert (found.missing_ranks, cause.kind, cause.ranks, cause.text) == ((1,), kind, (1,), text)
    assert str(cause).endswith(f"\n-> {ADVICE[kind].format(pid=811)}")


def test_a_stopped_rank_is_let_go_on_by_its_pid():
    (cause,) = report(waiting(0), late(process=Process("T"))).causes
    assert "`kill -CONT 811` lets it go on" in cause.advice


def test_a_rank_that_always_comes_late_is_slow():
    own = [operation(seq, 10 + 12 * seq, 1) for seq in range(5)]  # 11 s of its own each
    quick = [operation(seq, 10 + 12 * seq - 10, 11) for seq in range(5)]  # 1 s, then they wait
    first = RankView(0, 810, (*quick, operation(5, 60)), SLEEPS, WAITS)
    found = report(first, RankView(1, 811, tuple(own), SLEEPS, IN_USERS_CODE), now_ns=71 * S)
    (cause,) = found.causes
    told = "is slow: it works 11.0 s before each such operation, 11.0 x the other ranks"
    assert (cause.kind, cause.text) == ("slow", told)


def test_ranks_in_other_groups_wait_for_each_other():
    known = [operation(3, 70, 1, group=group) for group in (WORLD, OTHER)]
    a = RankView(0, 0, (*known, operation(176, 80)), SLEEPS, WAITS)
    b = RankView(1, 1, (*known, operation(9, 81, group=OTHER)), SLEEPS, WAITS)
    found = report(a, b)
    (cause,) = found.causes
    assert (found.missing, cause.kind, cause.ranks, cause.text) == (
        (),
        "groups",
        (0, 1),
        "wait for each other in different groups: rank 0 in all_reduce#176 for rank 1; rank 1 in all_reduce#9 for rank 0",
    )
    assert [text.rpartition("   ")[2] for _, text in found.waiting] == ["group of ranks 0,1"] * 2


def first_in(group: int, rank: int, *before: SpanView) -> RankView:
    """A rank that waits in the first operation of a group, which no member has used before."""
    return RankView(rank, rank, (*before, operation(1, 80, group=group)), SLEEPS, WAITS)


def test_ranks_that_use_two_new_groups_in_another_order_each_are_told_so():
    found = report(first_in(WORLD, 0), first_in(OTHER, 1))
    (cause,) = found.causes
    assert (found.missing, found.certain, cause.kind, cause.text) == (
        (),
        True,
        "groups",
        "wait for each other in different groups: rank 0 in all_reduce#1 for rank 1; rank 1 in all_reduce#1 for rank 0",
    )
    assert cause.advice == "let all ranks use their groups in the same order"
    groups = [text.rpartition("   ")[2] for _, text in found.waiting]
    assert groups == ["group of rank 0 and perhaps more", "group of rank 1 and perhaps more"]


def test_who_waits_for_a_rank_in_another_new_group_does_so_perhaps():
    known = operation(3, 70, 1)
    found = report(
        *(first_in(group, r, known) for r, group in enumerate((0xC, 0xD, 0xC))),
        RankView(3, 3, (known, operation(4, 82)), SLEEPS, WAITS),
    )
    (cause,) = found.causes
    assert (found.certain, cause.ranks, cause.text) == (
        False,
        (0, 1, 2),
        (
            "wait for each other in different groups: rank 0 in all_reduce#1 for perhaps rank 1; "
            "rank 1 in all_reduce#1 for perhaps ranks 0,2; rank 2 in all_reduce#1 for perhaps rank 1"
        ),
    )


def test_a_new_group_is_left_out_by_a_rank_that_waits_in_an_old_one():
    known = operation(3, 70, 1)
    skipped = RankView(1, 1, (known, operation(4, 82)), SLEEPS, WAITS)
    (cause,) = report(first_in(OTHER, 0, known), skipped).causes
    assert (cause.kind, cause.text) == (
        "groups",
        "wait for each other in different groups: rank 0 in all_reduce#1 for rank 1; rank 1 in all_reduce#4 for rank 0",
    )


def test_ranks_that_have_all_come_to_a_new_group_are_not_said_to_wait_for_others():
    found = report(first_in(WORLD, 0), first_in(WORLD, 1))
    assert [cause.kind for cause in found.causes] == ["inside"]


def test_one_that_does_not_wait_is_missing_whatever_others_do_in_new_groups():
    known = operation(3, 70, 1)
    went_on = RankView(1, 1, (known, operation(1, 80, group=OTHER)), RUNS, IN_USERS_CODE)
    found = report(first_in(OTHER, 0, known), went_on, first_in(0xC, 2, known))
    assert found.missing_ranks == (1,)


def test_a_large_first_transfer_in_a_new_group_waits_for_nobody():
    known = operation(3, 70, 1)
    pair = [first_in(OTHER, r, known)._replace(process=RUNS) for r in range(2)]
    third = first_in(0xC, 2, known)._replace(process=RUNS)
    assert report(*pair, third) is None


def test_ranks_in_other_operations_of_one_group_have_taken_another_branch():
    odd = RankView(1, 1, (operation(2, 85, channel=7, name="barrier()"),), SLEEPS, WAITS)
    found = report(waiting(0, operation(1, 70, 1, channel=7)), odd)
    assert (found.missing, [cause.kind for cause in found.causes]) == ((), ["order"])


def test_a_rank_that_waits_after_its_last_step_has_run_out_of_batches():
    ended = [span("step", 80, 5, 43), operation(2, 86, channel=7, name="barrier()")]
    found = report(
        waiting(0, operation(1, 70, 1, channel=7), span("step", 85, None, 44)),
        RankView(1, 1, tuple(ended), SLEEPS, WAITS),
    )
    (cause,) = found.causes
    assert (found.missing, cause.kind, cause.ranks) == ((), "batches", (1,))


def test_receivers_that_face_each_other_are_told_to_let_one_send():
    first, second = (
        RankView(
            rank,
            rank,
            (operation(1, 80, channel=1 + rank, name=f"recv(float32[4], from rank {1 - rank})"),),
            SLEEPS,
            WAITS,
        )
        for rank in range(2)
    )
    assert [cause.kind for cause in report(first, second).causes] == ["messages"]


def test_a_sender_waits_for_its_receiver_only():
    sender = RankView(
        0, 0, (operation(5, 80, channel=3, name="send(float32[4], to rank 2)"),), SLEEPS, WAITS
    )
    others = [RankView(r, r, (operation(1, 1, 1),), SLEEPS, IN_USERS_CODE) for r in (1, 2)]
    assert report(sender, *others).missing_ranks == (2,)


def test_a_partner_that_exchanges_with_somebody_else_has_not_come():
    text = "send(float32[4], to rank 1)"
    sender = RankView(0, 0, (operation(5, 80, channel=2, name=text),), SLEEPS, WAITS)
    text = "recv(float32[4], from rank 2)"
    receiver = RankView(1, 1, (operation(5, 80, channel=2, name=text),), SLEEPS, WAITS)
    third = RankView(2, 2, (operation(1, 1, 1),), RUNS, IN_USERS_CODE)
    found = report(sender, receiver, third)
    assert (found.missing_ranks, found.waiting_ranks, found.certain) == ((2,), (0, 1), True)


def test_from_whom_a_message_should_come_may_be_unknown():
    text = "recv(float32[4], from any rank)"
    receiver = RankView(0, 0, (operation(5, 80, channel=1, name=text),), SLEEPS, WAITS)
    others = [RankView(r, r, (operation(1, 1, 1),), RUNS, IN_USERS_CODE) for r in (1, 2)]
    found = report(receiver, *others)
    assert (found.missing_ranks, found.certain) == ((1, 2), False)


def test_a_chain_of_waits_ends_at_the_rank_that_waits_for_nobody():
    middle = (operation(1, 1, 1), operation(2, 85, group=OTHER))
    chain = [
        waiting(0),
        RankView(1, 1, middle, SLEEPS, WAITS),
        RankView(2, 2, (operation(176, 70, 1), operation(1, 71, 1, group=OTHER)), RUNS),
    ]
    found = report(*chain)
    assert (found.missing_ranks, found.waiting_ranks) == ((2,), (0, 1))


def test_a_rank_that_began_the_operation_and_went_on_is_missing():
    went_on = RankView(1, 1, (operation(176, 80), span("optimizer", 81)), RUNS, IN_USERS_CODE)
    found = report(waiting(0), went_on)
    assert (found.missing_ranks, found.causes[0].kind) == ((1,), "busy")


def test_who_is_not_known_to_belong_to_the_group_is_missing_perhaps():
    alone = RankView(0, 0, (operation(1, 80, group=OTHER),), SLEEPS, WAITS)
    found = report(alone, late())
    assert (found.missing_ranks, found.certain) == ((1,), False)
    assert "perhaps: the members of that group" in str(found)


def test_when_all_have_come_nobody_is_blamed():
    found = report(waiting(0), waiting(1))
    assert (found.missing, [cause.kind for cause in found.causes]) == ((), ["inside"])


@pytest.mark.parametrize(
    "views",
    [
        (waiting(0, t_s=95), late()),  # not long enough
        (late(), late()._replace(rank=0)),  # nobody waits
        (  # operations are under way in the background while all compute
            RankView(0, 0, (operation(176, 80),), RUNS, IN_USERS_CODE),
            RankView(1, 1, (operation(176, 80),), RUNS, IN_USERS_CODE),
        ),
        (  # the same without stacks: what was recorded later tells
            RankView(0, 0, (operation(176, 80), span("optimizer", 81)), RUNS),
            RankView(1, 1, (operation(176, 80), span("optimizer", 81)), RUNS),
        ),
        (waiting(0)._replace(process=RUNS), waiting(1)),  # a large transfer moves
        (),
    ],
)
def test_no_alarm_is_raised(views):
    assert report(*views) is None


def test_many_missing_ranks_of_one_cause_are_one_line():
    others = [late(process=RUNS)._replace(rank=rank, pid=900 + rank) for rank in range(1, 20)]
    found = report(waiting(0), *others)
    assert [(cause.kind, cause.ranks) for cause in found.causes] == [("busy", tuple(range(1, 20)))]
    assert str(found).count("(pid ") == 6
    assert "           and ranks 7-19\n" in str(found)


@pytest.mark.parametrize("owner", ["comm/progress.py", "comm/torch_backend/futures.py"])
def test_a_thread_in_the_background_does_not_make_its_rank_wait(owner):
    background = dump(
        "/opt/python/lib/python3.11/threading.py:320 in wait",
        f"{BRAID_ROOT}/runtime/transport/wait.py:180 in until",
        f"{BRAID_ROOT}/{owner}:240 in _turn",
        f"{BRAID_ROOT}/{owner}:210 in _run",
        "/opt/python/lib/python3.11/threading.py:982 in run",
    ).replace("Current thread", "Thread")
    text = f"{background}\n\n{IN_USERS_CODE}"
    assert [waits_for_peers(parse_threads(t)) for t in (text, f"{background}\n\n{WAITS}")] == [
        False,
        True,
    ]


def test_a_function_that_a_peer_has_called_makes_its_rank_wait():
    serving = dump(
        "/opt/python/lib/python3.11/threading.py:320 in wait",
        f"{BRAID_ROOT}/rpc/leader_followers.py:141 in wait",
        "/home/me/train.py:28 in relay",
        f"{BRAID_ROOT}/rpc/callee.py:91 in run",
        f"{BRAID_ROOT}/rpc/leader_followers.py:269 in _run",
    ).replace("Current thread", "Thread")
    assert waits_for_peers(parse_threads(f"{serving}\n\n{IN_USERS_CODE}"))


IN_SYNCHRONIZE = dump(
    "/opt/python/lib/python3.12/site-packages/torch/cuda/streams.py:105 in synchronize",
    f"{BRAID_ROOT}/comm/tensors/copies.py:231 in copy",
    f"{BRAID_ROOT}/comm/engines/progress.py:71 in execute",
    "/home/me/train.py:41 in step",
)
GPU_SPAN = span("wait for cuda:0", 89.9)


@pytest.mark.parametrize(
    ("spans", "stack"), [((), IN_SYNCHRONIZE), ((GPU_SPAN,), WAITS)], ids=["stack", "span"]
)
def test_a_rank_that_waits_for_its_gpu_inside_of_the_operation_is_named(spans, stack):
    spinning = RankView(1, 811, (operation(175, 80, 1), operation(176, 89.9), *spans), RUNS, stack)
    found = report(waiting(0), spinning, waiting(2))
    assert (found.waiting_ranks, found.missing_ranks) == ((0, 2), (1,))
    (cause,) = found.causes
    assert str(cause).startswith(
        "rank 1 waits for its GPU in all_reduce#176 at train.py:41 in step: work that was queued "
        "there before has not ended\n-> find the kernel"
    )


def test_ranks_that_all_wait_for_their_gpus_do_not_hang():
    views = [RankView(rank, 811, (operation(176, 80),), RUNS, IN_SYNCHRONIZE) for rank in range(2)]
    assert report(*views) is None


def test_a_wait_for_the_gpu_that_has_ended_makes_no_rank_missing():
    over = span("wait for cuda:0", 89.9, 0.1)
    views = [
        waiting(0),
        RankView(1, 811, (operation(175, 80, 1), operation(176, 89.9), over), SLEEPS, WAITS),
    ]
    found = report(*views)
    assert found.missing_ranks == ()


SPANS = st.builds(
    SpanView,
    st.sampled_from(
        [
            REDUCE,
            "recv(int64[2], from rank 1)",
            "recv(int64[2], from any rank)",
            "barrier()",
            "step",
            "wait",
            "data",
        ]
    ),
    st.integers(1, 100).map(lambda t: t * S),
    st.sampled_from([OPEN, 0, S]),
    st.sampled_from([0, WORLD, OTHER]),
    st.integers(0, 3),
    st.integers(0, 3),
)
VIEWS = st.builds(
    RankView,
    st.just(0),
    st.just(7),
    st.lists(SPANS, max_size=8).map(lambda spans: tuple(sorted(spans, key=lambda s: s.t_ns))),
    st.builds(Process, st.sampled_from("RSDTtZ"), st.sampled_from([None, 0.0, 1.0])),
    st.sampled_from(["", WAITS, IN_USERS_CODE, IN_LOADER]),
    st.sampled_from(["", "", "exited with code 0"]),
)


@given(st.lists(VIEWS, max_size=5))
def test_a_rank_that_waits_is_never_missing_and_one_that_does_not_never_waits(views):
    views = [view._replace(rank=rank) for rank, view in enumerate(views)]
    found = report(*views)
    waits = {view.rank for view in views if view.waits}
    if found is not None:
        assert not waits & set(found.missing_ranks)
        assert set(found.waiting_ranks) <= waits
        assert str(found).startswith("braid: no progress for ")
        assert found.causes


@given(st.text())
def test_any_text_is_parsed_as_a_stack(text):
    threads = parse_threads(f"Current thread 0x1 (most recent call first):\n{text}\n{WAITS[5:]}")
    assert waits_for_peers(threads) in {True, False}


def _connected(rank: int, last_s: float, num_repeats: int = 5) -> RankView:
    """A rank in an operation, on host a or b, where something came from the other one last."""
    addresses = ("10.0.0.1", "10.0.0.2")[:: 1 - 2 * rank]
    links = (LinkView(*addresses, round((100 - last_s) * S), num_repeats),)
    return RankView(rank, 7, (operation(8 + rank, 80),), SLEEPS, WAITS, links=links)


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (
            12,
            12.2,
            "hosts a and b have received nothing from each other for 12 s (last from b: 12 s ago, ",
        ),
        (
            0.2,
            12,
            "host b has received nothing from host a for 12 s (last from b: 0.2 s ago, last from a: 12",
        ),
        (
            18,
            6.3,
            "host a has received nothing from host b for 18 s (last from b: 18 s ago, last from a: 6.3",
        ),
        (12, None, "host a has received nothing from host b for 12 s, not even an answer"),
    ],
)
def test_hosts_that_do_not_hear_each_other_are_named_with_both_directions(a, b, told):
    views = [_connected(0, a), _connected(1, b) if b else RankView(1, 8, (operation(9, 80),))]
    names = {"10.0.0.1": "a", "10.0.0.2": "b"}
    report = find_hang(views, now_ns=NOW, limit_ns=LIMIT, hosts=names)
    assert (report.missing, [cause.kind for cause in report.causes]) == ((), ["link"])
    assert told in str(report)


def test_one_packet_that_was_lost_is_no_broken_link():
    views = [_connected(rank, 12, num_repeats=1) for rank in (0, 1)]
    report = find_hang(views, now_ns=NOW, limit_ns=LIMIT, hosts={})
    assert "link" not in [cause.kind for cause in report.causes]


# -- calls of functions

IN_CALL = dump(
    f"{BRAID_ROOT}/runtime/message/vans/stream_van.py:300 in recv",
    f"{BRAID_ROOT}/rpc/leader_followers.py:150 in wait",
    "/home/me/train.py:7 in relay",
)
SERVES = "\n".join(
    [
        "Thread 0x00007f2 (most recent call first):",
        '  File "/home/me/train.py", line 4 in slow',
        f'  File "{BRAID_ROOT}/rpc/callee.py", line 90 in _result',
        f'  File "{BRAID_ROOT}/rpc/leader_followers.py", line 240 in _run',
        "",
        dump(
            f"{BRAID_ROOT}/rpc/leader_followers.py:150 in wait", "/home/me/train.py:16 in <module>"
        ),
    ]
)


def call(seq: int, to: int, t_s: float = 85.0) -> SpanView:
    return operation(seq, t_s, name=f"call(job:relay, to rank {to})", channel=seq)


def serve(seq: int, sender: int, t_s: float = 85.0) -> SpanView:
    return operation(seq, t_s, name=f"serve(job:slow, for rank {sender})", channel=sender, site="")


def callers(process: Process, *last: SpanView) -> list[RankView]:
    """Rank 0 waits for rank 1, which waits for rank 2, which runs a function and calls `last`."""
    return [
        RankView(0, 810, (call(6, 1),), SLEEPS, IN_CALL),
        RankView(1, 811, (serve(6, 0), call(11, 2)), SLEEPS, IN_CALL),
        RankView(2, 812, (serve(11, 1), *last), process, IN_CALL if last else SERVES),
    ]


def test_a_chain_of_calls_ends_at_the_function_that_does_not_return():
    report = find_hang(callers(SLEEPS), now_ns=NOW, limit_ns=LIMIT)
    assert report.waiting_ranks == (0, 1)
    assert report.missing_ranks == (2,)
    text = str(report)
    assert "call#6  job:relay, to rank 1   train.py:41 in step" in text
    assert "rank 2 (pid 812)   at train.py:4 in slow" in text
    assert "as it began to serve job:slow, for rank 1" in text


def test_a_called_function_that_computes_is_no_hang():
    assert find_hang(callers(RUNS), now_ns=NOW, limit_ns=LIMIT) is None


def test_a_called_function_that_calls_others_in_turn_is_no_hang():
    """On a busy host it gets few cores: it was seen between two calls."""
    views = callers(SLEEPS)
    made = operation(20, 99.5, 0.2, name="call(job:relay, to rank 0)", channel=20)
    views[2] = RankView(2, 812, (serve(11, 1), made), SLEEPS, SERVES)
    assert find_hang(views, now_ns=NOW, limit_ns=LIMIT) is None
    views[2] = RankView(2, 812, (serve(11, 1), made._replace(t_ns=86 * S)), SLEEPS, SERVES)
    assert find_hang(views, now_ns=NOW, limit_ns=LIMIT).missing_ranks == (2,)


def test_calls_in_a_circle_are_a_deadlock():
    report = find_hang(callers(SLEEPS, call(20, 0)), now_ns=NOW, limit_ns=LIMIT)
    assert report.waiting_ranks == (0, 1, 2)
    assert report.missing_ranks == ()
    assert "wait for each other's calls" in str(report)
    assert "RpcOptions(num_worker_threads=...)" in str(report)


def test_calls_in_a_circle_that_are_answered_are_no_deadlock():
    views = callers(SLEEPS, call(20, 0, t_s=99.9))  # a function that calls its caller in a loop
    assert find_hang(views, now_ns=NOW, limit_ns=LIMIT) is None


def test_a_request_is_followed_through_the_server_that_holds_it_to_the_worker_that_is_awaited():
    pull = operation(3, 85.0, name="pull(table 'w', asked of ranks 1,4)")
    hold = operation(2, 86.0, name="hold(worker 0 waits for 1 (at clock 2), asked of rank 3)")
    report = find_hang(
        [
            RankView(1, 811, (hold,), SLEEPS, IN_CALL),
            RankView(2, 812, (pull,), SLEEPS, IN_CALL),
            RankView(3, 813, (), SLEEPS, SERVES),
            RankView(4, 814, (hold,), SLEEPS, IN_CALL),
        ],
        now_ns=NOW,
        limit_ns=LIMIT,
    )
    assert (report.waiting_ranks, report.missing_ranks) == ((1, 2, 4), (3,))
    assert "pull#3  table 'w', asked of ranks 1,4" in str(report)
