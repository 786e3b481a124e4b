"""Values between stages arrive also if their form changes, and if the next rank is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from braid.comm import Group
from braid.errors import MismatchError, PeerLostError
from braid.parallel.pipeline.messages import Messages
from support.call_counts import CallCounts, count_calls
from support.pool import RankDiedError


class Marked(torch.Tensor):
    pass


FORMS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(12.0).view(2, 2, 3),
    "with gradient": lambda: torch.arange(12.0).view(2, 2, 3).requires_grad_(),
    "computed": lambda: torch.arange(12.0).view(2, 2, 3).requires_grad_() * 2,
    "other dtype": lambda: torch.arange(12).view(2, 2, 3),
    "other shape": lambda: torch.arange(12.0),
    "other order": lambda: torch.arange(12.0).view(2, 3, 2).transpose(1, 2),
    "with gaps": lambda: torch.arange(48.0).view(2, 4, 6)[:, ::2, ::2],
    "empty": lambda: torch.empty(2, 0, 3),
    "number": lambda: torch.tensor(3.0),
    "parameter": lambda: torch.nn.Parameter(torch.arange(12.0).view(2, 2, 3)),
    "subclass": lambda: torch.arange(12.0).view(2, 2, 3).as_subclass(Marked),
    "negative view": lambda: torch.view_as_complex(torch.arange(24.0).view(2, 2, 3, 2)).conj().imag,
    "tuple": lambda: (torch.arange(12.0).view(2, 2, 3),),
    "dictionary": lambda: {"x": torch.arange(12.0).view(2, 2, 3), "n": 1},
    "large": lambda: torch.ones(1 << 16),
    "in the pool": lambda: torch.arange(float(1 << 19)).view(2, -1).requires_grad_(),
    "in the pool, other order": lambda: torch.arange(1 << 20).short().view(2, 8, -1).mT,
}


def _tensor_in(value: Any) -> torch.Tensor:
    return value["x"] if isinstance(value, dict) else value[0] if type(value) is tuple else value


def _changes(group: Group) -> list[str]:
    """Each form after each other one, each twice; the pairs after which a value arrived wrong."""
    messages, wrong = Messages(group), []
    for first in FORMS:
        for second in FORMS:
            for name in (first, second, second):
                value = FORMS[name]()
                if group.rank == 0:
                    messages.send_value(value, 1)
                    continue
                received = messages.recv_value(0)
                x, y = _tensor_in(value), _tensor_in(received)
                same = (
                    type(received) is (type(value) if type(value) in {tuple, dict} else type(y))
                    and type(y) is torch.Tensor
                    and (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, x.requires_grad)
                    and torch.equal(x.detach(), y.detach())
                    and (name in {"with gaps", "negative view"} or x.stride() == y.stride())
                    and not ("pool" in name and y._is_view())
                )
                wrong += [] if same else [f"{name} of {first} and {second}"]
    messages.finish()
    return wrong


def test_values_of_changing_forms_arrive_as_they_were_sent(procs):
    assert procs(2, _changes) == [[], []]


def _kept(group: Group) -> tuple[list[float], list[int]]:
    """First elements of large tensors that are all kept, and the number of free blocks."""
    messages, num_free, firsts = Messages(group), [], []
    for _ in range(2):
        values = [torch.full((1 << 19,), float(number)) for number in range(4)]
        if group.rank == 0:
            for value in values:
                messages.send_value(value, 1)
            messages.finish()
            continue
        received = [messages.recv_value(0) for _ in values]
        firsts += [value.unique().item() for value in received]
        num_free.append(len(messages._pool.free))
        del received
        num_free.append(len(messages._pool.free))
    return firsts, num_free


def test_large_values_use_memory_again_once_it_is_free(procs):
    _, (firsts, num_free) = procs(2, _kept)
    assert firsts == [0.0, 1.0, 2.0, 3.0] * 2
    assert num_free == [0, 4, 0, 4]


def _gradients(group: Group) -> list[str]:
    messages, wrong = Messages(group), []
    for _ in range(3):
        for name, form in FORMS.items():
            x = _tensor_in(form()).detach()
            if group.rank == 0:
                messages.send_tensors([x, x * 2], 1)
                continue
            for y, factor in zip(messages.recv_tensors([x, x], 0), (1, 2), strict=True):
                if type(y) is not torch.Tensor or not torch.equal(y, x * factor):
                    wrong.append(name)
    messages.finish()
    return wrong


def test_gradients_of_changing_forms_arrive_as_they_were_sent(procs):
    assert procs(2, _gradients) == [[], []]


def _received_is_apart(group: Group) -> list[list[float]]:
    """Values that were received before, and changed in place, do not change with the next ones."""
    messages, kept = Messages(group), []
    x = torch.zeros(3)
    for number in range(5):
        if group.rank == 0:
            messages.send_value(x.fill_(number), 1)  # it may change after a small message
            messages.finish()
        else:
            kept.append(messages.recv_value(0).add_(10))
    return [y.tolist() for y in kept]


def test_a_received_value_is_not_used_for_the_next_one(procs):
    assert procs(2, _received_is_apart)[1] == [[10.0 + n] * 3 for n in range(5)]


def _mismatch(group: Group) -> str:
    messages = Messages(group)
    try:
        for last in (4, 4, 4, 5):
            if group.rank == 0:
                messages.send_tensors([torch.ones(last)], 1)
            else:
                messages.recv_tensors([torch.ones(4)], 0)
        group.barrier()
    except MismatchError as exc:
        return str(exc)
    return "no error"


def test_gradients_of_another_shape_are_a_mismatch_after_right_ones(procs):
    for text in procs(2, _mismatch):
        assert "float32[4]" in text, text
        assert "float32[5]" in text, text


def _is_lost(group: Group) -> str:
    messages = Messages(group)
    try:
        for number in range(100_000):
            if group.rank == 0:
                messages.send_value(torch.full((4,), float(number)), 1)
                messages.finish()
            else:
                messages.recv_value(0)
                if number == 20:
                    os.kill(os.getpid(), signal.SIGKILL)
    except PeerLostError as exc:
        return str(exc)
    return "no error"


def test_a_rank_that_dies_between_two_values_is_named(pool):
    with pytest.raises(RankDiedError) as caught:
        pool.run(2, _is_lost)
    answer = caught.value.answers[0]
    assert answer.error is None, answer.error
    assert "rank 1 " in answer.result


def _counts(group: Group) -> tuple[CallCounts, CallCounts]:
    """Calls for a value and for gradients, by the rank that sends and by the rank that receives."""
    messages, x, found = Messages(group), torch.ones(256), []
    for send, recv in (
        (lambda: messages.send_value(x, 1), lambda: messages.recv_value(0)),
        (lambda: messages.send_tensors([x], 1), lambda: messages.recv_tensors([x], 0)),
    ):
        counts = []
        for _ in range(60):
            group.barrier()
            if group.rank == 0:
                counts.append(count_calls(send))
            group.barrier()
            if group.rank == 1:
                counts.append(count_calls(recv))
        found.append(min(counts, key=lambda c: c.calls))
    return found[0], found[1]


def test_a_small_value_and_its_gradient_make_few_calls(pool):
    sender, receiver = pool.run(2, _counts, portable=False, ranks_per_host=0)
    for counts, limit in zip((*sender, *receiver), (24, 23, 20, 18), strict=True):
        assert counts.calls <= limit, counts.by_function
