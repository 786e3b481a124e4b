"""Faults of messages in a simulated network, and the dice that choose them.

Faults strike whole messages and heartbeats, since a broken frame ends a link and is tested
elsewhere. A message is
    dropped        it never arrives
    duplicated     it arrives again after a new delay
    delayed        by up to `delay_s`; later messages of its priority wait with it
    reordered      delayed by up to `delay_s` without holding up others
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from braid.errors import ConfigError

__all__ = ["Copy", "Faults"]


class Copy(NamedTuple):
    """One arrival of a message.

    Attributes:
        late_ns: Delay beyond that without faults.
        in_order: Whether later messages wait for it.
    """

    late_ns: int
    in_order: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Probabilities of faults of a message, each from 0 to 1.

    Attributes:
        drop: Probability that the message never arrives.
        duplicate: Probability that it arrives once more.
        delay: Probability that it, and later messages, are late by up to `delay_s`.
        reorder: Probability that it is late by up to `delay_s`, and other messages overtake it.
        delay_s: Largest delay, in seconds.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    delay_s: float = 0.01

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {value:g}"
            for name, value in (
                ("drop", self.drop),
                ("duplicate", self.duplicate),
                ("delay", self.delay),
                ("reorder", self.reorder),
            )
            if not 0 <= value <= 1
        ]
        if self.delay_s < 0:
            problems.append(f"delay_s = {self.delay_s:g}")
        if problems:
            msg = f"probabilities of Faults must be from 0 to 1, got {', '.join(problems)}"
            raise ConfigError(msg)

    def strike(self, chance: random.Random) -> list[Copy]:
        """Throw the dice for one message; returns the copies that arrive, none if it is dropped."""
        if chance.random() < self.drop:
            return []
        num_copies = 2 if chance.random() < self.duplicate else 1
        return [self._copy(chance) for _ in range(num_copies)]

    def _copy(self, chance: random.Random) -> Copy:
        reordered = chance.random() < self.reorder
        late_ns = 0
        if reordered or chance.random() < self.delay:
            late_ns = round(chance.random() * self.delay_s * 1e9)
        return Copy(late_ns, in_order=not reordered)
