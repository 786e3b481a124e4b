"""Timeout errors that include the pending waits of other nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from braid.errors import CommTimeout
from braid.ps.messages import Explain, Explained
from braid.runtime.message import Delivery

if TYPE_CHECKING:
    from braid.ps.postoffice import Postoffice

__all__ = ["explained"]

EXPLAIN_S = 1.0  # time for nodes to report their waits, after a deadline has passed


def explained(office: Postoffice, error: CommTimeout, nodes: Iterable[str]) -> CommTimeout:
    """Return a copy of `error` with the pending waits that each node in `nodes` reports."""
    answers: dict[str, list[str]] = {node: [] for node in nodes}
    asked: dict[int, str] = {office.new_id(): node for node in answers}
    silent = set(answers)

    def note(delivery: Delivery) -> None:
        silent.discard(delivery.sender)
        if isinstance(delivery.message, Explained):
            answers[delivery.sender] = delivery.message.lines

    with office.lock:
        for number, node in asked.items():
            office.expected[number] = note
            office.send(node, Explain(), message_id=number)
    with contextlib.suppress(CommTimeout):
        office.wait_until(lambda: not silent, EXPLAIN_S)
    with office.lock:
        for number in asked:
            office.expected.pop(number, None)
    lines = [f"{node}: {line}" for node in answers for line in answers[node]]
    lines += [f"{node} does not answer: it is busy, stopped or gone" for node in sorted(silent)]
    return CommTimeout("; ".join([str(error), *lines]))
