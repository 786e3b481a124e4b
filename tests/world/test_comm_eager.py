"""Small messages that need no operation behave as messages with one, also when something fails."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from typing import Any

import pytest
import torch

from braid.comm import Group
from braid.comm.engines.work import StepsBy
from braid.errors import CommError, ConfigError, MismatchError, PeerLostError, StaleError
from support.pool import RankDiedError


def _is_interrupted(group: Group) -> list[str]:
    """Rank 0 is interrupted inside of its second send; each rank returns what it got."""
    x, seen = torch.zeros(4), []
    if group.rank:
        for _ in range(3):
            try:
                seen.append(str(group.recv(x, 0, timeout_s=20.0)[0].item()))
            except CommError as exc:
                seen.append(str(exc))
        return seen
    transport = group.engine.transport
    publish = transport.publish

    def interrupted(*args: Any, **options: Any) -> None:
        publish(*args, **options)
        if seen == ["1"]:
            raise KeyboardInterrupt

    transport.publish = interrupted
    for number in (1, 2, 3):
        try:
            group.send(torch.full((4,), float(number)), 1)
            seen.append(str(number))
        except (KeyboardInterrupt, StaleError) as exc:
            seen.append(type(exc).__name__)
            transport.publish = publish
    return seen


def test_an_interrupt_inside_of_a_send_ends_the_group(procs):
    sender, receiver = procs(2, _is_interrupted)
    assert sender == ["1", "KeyboardInterrupt", "StaleError"]
    assert receiver[:2] == ["1.0", "2.0"]  # it was published
    assert "KeyboardInterrupt in send(float32[4], to rank 1)" in receiver[2]


def _is_closed_meanwhile(group: Group) -> str:
    part = group.split(0)
    group.barrier()
    result = []
    if group.rank:
        begun, waiter = threading.Event(), part.engine.transport.waiter

        def spin(ready: Any) -> int:
            begun.set()
            return type(waiter).spin(waiter, ready)

        def receive() -> None:
            with pytest.raises(StaleError) as raised:
                part.recv(torch.zeros(4), 0, timeout_s=20.0)
            result.append(str(raised.value))

        waiter.spin = spin
        thread = threading.Thread(target=receive)
        thread.start()
        begun.wait()
        part.close()
        thread.join()
        del waiter.spin
    group.barrier()
    return "".join(result)


def test_closing_a_group_ends_a_receive_that_has_just_begun(procs):
    assert "close" in procs(2, _is_closed_meanwhile)[1]


def _of_any_dtype(group: Group) -> list[bool]:
    raw = torch.arange(64, dtype=torch.uint8)
    same = []
    for dtype in (torch.bool, torch.uint4, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        x, y = raw.clone().view(dtype), torch.zeros_like(raw).view(dtype)
        if group.rank == 0:
            group.send(x, 1)
        else:
            same.append(torch.equal(group.recv(y, 0).view(torch.uint8), raw))
    return same


def test_a_message_of_any_dtype_keeps_its_bytes(procs):
    assert procs(2, _of_any_dtype)[1] == [True] * 5


def _posted_before(group: Group) -> list[float]:
    """A receive from any rank was posted before, so it gets the first message."""
    x, y = torch.zeros(4), torch.zeros(4)
    if group.rank == 0:
        group.barrier()
        for number in (1.0, 2.0):
            group.send(torch.full((4,), number), 1)
        return []
    work = group.recv(x, None, async_op=True)
    group.barrier()
    group.recv(y, 0)
    work.wait()
    return [x[0].item(), y[0].item()]


def test_messages_reach_receives_in_the_order_in_which_they_were_posted(procs):
    assert procs(2, _posted_before)[1] == [1.0, 2.0]


def _in_inference_mode(group: Group) -> list[float]:
    x = torch.ones(4)
    with torch.inference_mode():
        made = torch.ones(4)
        for one in (x, made):
            if group.rank == 0:
                group.send(one, 1)
            else:
                group.recv(one.zero_(), 0)
    return [*x.tolist(), *made.tolist()]


def test_messages_pass_in_inference_mode(procs):
    assert procs(2, _in_inference_mode)[1] == [1.0] * 8


def _calls_back(group: Group) -> list[str]:
    """The callback of a message that was sent fails in the callback only."""
    if group.rank:
        group.recv(torch.zeros(4), 0)
        return []
    seen: list[str] = []
    before, threading.excepthook = threading.excepthook, lambda args: seen.append(str(args[1]))
    try:
        work = group.send(torch.ones(4), 1, async_op=True)
        work.add_done_callback(lambda work: seen.append(str(work)) or 1 / 0)
        work.wait()
    finally:
        threading.excepthook = before
    return seen


def test_an_error_of_a_callback_does_not_reach_the_sender(procs):
    seen = procs(2, _calls_back)[0]
    assert seen == ["Work(send(float32[4], to rank 1), done)", "division by zero"]


LIKE = {
    "plain": lambda: torch.arange(6.0).view(2, 3),
    "strided": lambda: torch.arange(6.0).view(3, 2).T,
    "of one that requires grad": lambda: torch.arange(6.0).view(2, 3).requires_grad_(),
    "a parameter": lambda: torch.nn.Parameter(torch.arange(6.0).view(2, 3)),
    "negative view": lambda: torch.view_as_complex(torch.arange(12.0).view(2, 3, 2)).conj().imag,
    "an array": lambda: torch.arange(6.0).view(2, 3).numpy(),
    "expanded": lambda: torch.arange(3.0).expand(2, 3),
    "other shape": lambda: torch.arange(6.0).view(3, 2),
    "bytes": lambda: torch.arange(24, dtype=torch.uint8),
    "number": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(2, 0, 3),
}


SEND = {  # the same message by a call that waits, and by calls that return a Work
    "waiting": lambda group, x, tag: group.send(x, 1, tag=tag),
    "in the background": lambda group, x, tag: group.send(x, 1, tag=tag, async_op=True).wait(),
    "started": lambda group, x, tag: group.starting().send(x, 1, tag=tag).wait(),
    "started for later": lambda group, x, tag: (
        group.starting(steps_by=StepsBy.WAITER).send(x, 1, tag=tag).wait()
    ),
}


def _repeats_all(group: Group, how: str) -> list[str]:
    """Messages like earlier ones, in every order of two, with tags; the kinds that arrived wrong."""
    wrong = []
    for first, second in itertools.product(LIKE, LIKE):
        for tag, name in ((0, first), (5, second), (-3, first), (0, second)):
            x = LIKE[name]()
            if group.rank == 0:
                SEND[how](group, x, tag)
                continue
            y = torch.as_tensor(x).detach().contiguous() * 0 - 1
            y = {"strided": y.T.contiguous().T, "an array": y.numpy()}.get(name, y)
            group.recv(y, 0, tag=tag)
            if not torch.equal(torch.as_tensor(y), torch.as_tensor(x).detach()):
                wrong.append(f"{name} after {first}")
    return wrong


@pytest.mark.parametrize("how", SEND)
def test_repeated_messages_of_any_kind_arrive(procs, how):
    assert procs(2, _repeats_all, how) == [[], []]


def _started_again(group: Group) -> list[Any]:
    """The Work of a message like earlier ones, and the order of such messages among others."""
    x, large, seen = torch.ones(4), torch.ones(1 << 20), []
    if group.rank:
        return [group.recv(torch.zeros_like(like), 0)[0].item() for like in (x, x, large, x)]
    starter = group.starting()
    for _ in range(2):
        work = starter.send(x, 1)
    works = [starter.send(large.mul_(2), 1), starter.send(x.mul_(3), 1)]
    seen += [work.result is x, work.done(), work.succeeded, work.source, work.exception()]
    work.add_done_callback(lambda work: seen.append(str(work)))
    for work in works:
        work.wait(20.0)
    return seen


def test_a_started_message_like_an_earlier_one_is_done_and_passes_no_other(procs):
    sender, receiver = procs(2, _started_again)
    assert sender == [True, True, True, -1, None, "Work(send(float32[4], to rank 1), done)"]
    assert receiver == [1.0, 1.0, 2.0, 3.0]


def _started_receives(group: Group) -> list[float]:
    """Receives that are started before and after their message, of a known form."""
    x, y, starter = torch.zeros(4), torch.zeros(4), group.starting()
    for _ in range(3):
        if group.rank == 0:
            group.send(torch.ones(4), 1)
            group.barrier()
            group.send(torch.full((4,), 2.0), 1)
        else:
            group.recv(x, 0)
            work = starter.recv(y, 0)
            assert not work.done()
            group.barrier()
            work.wait(20.0)
    return [x[0].item(), y[0].item()]


def test_a_started_receive_of_a_known_form_does_not_wait(procs):
    assert procs(2, _started_receives)[1] == [1.0, 2.0]


class OtherEngine:
    """Engine of another kind for tensors on the CPU, which records the messages started on it."""

    device_types = frozenset({"cpu"})
    forked = False

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(self, collective: Any, _steps_by: StepsBy) -> None:
        self.started.append(collective.text)

    def run(self, collective: Any) -> None:
        self.started.append(collective.text)

    def close(self) -> None:
        pass


def _gets_another_engine(group: Group) -> list[str]:
    part, x = group.split(0), torch.ones(4)
    starter = part.starting()
    for _ in range(2):
        if part.rank == 0:
            starter.send(x, 1)
            part.send(x, 1)
        else:
            part.recv(x, 0)
            part.recv(x, 0)
    engine = OtherEngine()
    part.attach(engine)
    if part.rank == 0:
        starter.send(x, 1)
        part.send(x, 1)
    else:
        part.recv(x, 0)
    group.barrier()
    part.close()
    return engine.started


def test_known_messages_go_to_an_engine_that_is_attached_later(procs):
    sender, receiver = procs(2, _gets_another_engine)
    assert sender == ["send(float32[4], to rank 1)"] * 2
    assert receiver == ["recv(float32[4], from rank 0)"]


def _sends_until_lost(group: Group) -> str:
    x = torch.ones(4)
    if group.rank:
        for _ in range(10):
            group.recv(x, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    starter = group.starting()
    try:
        while True:
            starter.send(x, 1).wait(20.0)
    except PeerLostError as exc:
        return str(exc)


def test_a_lost_peer_ends_started_messages_of_a_known_form(pool):
    with pytest.raises(RankDiedError) as caught:
        pool.run(2, _sends_until_lost)
    answer = caught.value.answers[0]
    assert answer.error is None, answer.error
    assert "rank 1 " in answer.result


def _sends_after_the_end(group: Group) -> list[str]:
    part, x, seen = group.split(0), torch.ones(4), []
    starter = part.starting()
    for _ in range(3):
        starter.send(x, 1) if part.rank == 0 else part.recv(x, 0)
    group.barrier()
    if part.rank:
        part.abort("enough")
    group.barrier()
    for _ in range(4):  # the first ones may still find a free slot
        try:
            if part.rank == 0:
                starter.send(x, 1).wait(20.0)
        except (CommError, StaleError) as exc:
            seen.append(str(exc))
    part.close()
    try:
        starter.send(x, 1 - part.rank)
    except StaleError as exc:
        seen.append(str(exc))
    group.barrier()
    return seen


def test_started_messages_of_an_ended_group_are_refused(procs):
    sender, receiver = procs(2, _sends_after_the_end)
    assert "enough" in sender[0]
    for seen in (sender, receiver):
        assert "cannot be used" in seen[-1]


def _is_refused_again(group: Group) -> list[str]:
    """What a call of each wrong kind raises after a message with the same shape has passed."""
    x, peer, seen = torch.ones(4), 1 - group.rank, []
    for _ in range(3):
        for act in (group.send, group.recv) if group.rank else (group.recv, group.send):
            act(x, peer)
    starter = group.starting()
    wrong = {
        "started to itself": lambda: starter.send(x, group.rank),
        "started to a rank": lambda: starter.send(x, float(peer)),
        "started with a tag": lambda: starter.send(x, peer, tag=1 << 61),
        "started sparse": lambda: starter.send(x.to_sparse(), peer),
        "rank": lambda: group.send(x, float(peer)),
        "itself": lambda: group.send(x, group.rank),
        "tag": lambda: group.send(x, peer, tag=1 << 61),
        "kind of tag": lambda: group.send(x, peer, tag=1.0),
        "seconds": lambda: group.send(x, peer, timeout_s=-1.0),
        "sparse": lambda: group.send(x.to_sparse(), peer),
        "overlapping": lambda: group.recv(torch.ones(1).expand(4), peer),
    }
    for name, act in wrong.items():
        try:
            act()
        except (ConfigError, StaleError):
            seen.append(name)
    part = group.split(0)
    for act in (part.send, part.recv) if group.rank else (part.recv, part.send):
        act(x, peer)
    part.close()
    try:
        part.send(x, peer)
    except StaleError:
        seen.append("closed")
    return [name for name in [*wrong, "closed"] if name not in seen]


def test_wrong_messages_are_refused_also_after_right_ones(procs):
    assert procs(2, _is_refused_again) == [[], []]


def _mismatch_again(group: Group, how: str) -> str:
    x, y = torch.ones(4), torch.ones(2, 2)
    for like in (x, y, x, y):
        if group.rank == 0:
            SEND[how](group, like, 0)
        else:
            group.recv(like, 0)
    group.barrier()
    try:
        if group.rank == 0:
            SEND[how](group, x, 0)
            group.barrier()
        else:
            group.recv(y, 0)
    except MismatchError as exc:
        return str(exc)
    return "no error"


@pytest.mark.parametrize("how", SEND)
def test_a_known_message_of_another_shape_is_a_mismatch(procs, how):
    sender, receiver = procs(2, _mismatch_again, how)
    for text in (sender, receiver):
        assert "float32[4]" in text, text
        assert "float32[2, 2]" in text, text
