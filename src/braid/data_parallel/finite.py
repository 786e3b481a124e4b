"""What to do about gradients that are not finite: said once per step, the same on all ranks, with names.

Problem: a NaN on one rank is in everybody's average a moment later, and nobody can say whose it was.

Idea: every rank looks at its own gradients before they leave (one number of each, or all), and says what it found beside them
(`params.status`). So all ranks know the step, the ranks and the parameters, and do the same about it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from braid.errors import BraidError, ConfigError
from braid.params import Outcome, Standing

__all__ = ["CHOICES", "NonFinite", "NonFiniteError", "Reaction", "react", "reaction_of"]

MAX_NAMES = 5
MANY = 10  # steps in a row that are skipped: no accident any more


class NonFinite(NamedTuple):
    """Gradients that are NaN or infinite.

    Attributes:
        step: Number of the reduction, from 1.
        ranks: Global ranks that have them.
        parameters: Names, the last of the module first: a NaN spreads from the loss towards the inputs.
    """

    step: int
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        more = len(self.parameters) - MAX_NAMES
        names = ", ".join(map(repr, self.parameters[:MAX_NAMES]))
        names += f" and {more} more" if more > 0 else ""
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        ranks = ranks if self.ranks else "a rank that has joined"
        return f"gradients of {names} are NaN or infinite on {ranks} in step {self.step}"


class NonFiniteError(BraidError, ArithmeticError):
    """Gradients are not finite; raised on all ranks."""


Reaction = Callable[[NonFinite], None]
CHOICES = ("ignore", "warn", "raise", "skip")


def reaction_of(wanted: str | Reaction, parameters: Sequence[torch.Tensor]) -> Reaction:
    """What a user's choice means.

    Args:
        wanted: ignore; warn, once; raise NonFiniteError; skip: leave all gradients None, so that the optimizer does nothing, and warn of the first
            one and of many in a row; or what shall be called.
        parameters: Those whose gradients are dropped by skip.

    Raises:
        ConfigError: It is none of these.
    """
    if callable(wanted):
        return wanted
    if wanted not in CHOICES:
        msg = f"expected nonfinite out of {', '.join(CHOICES)}, or something to call, found {wanted!r}"
        raise ConfigError(msg)
    known: dict[str, Reaction] = {
        "ignore": lambda _: None,
        "warn": _Warning(),
        "raise": _raise,
        "skip": _Skip(parameters),
    }
    return known[wanted]


def react(outcome: Outcome, ranks: tuple[int, ...], reaction: Reaction) -> None:
    """Call `reaction` if a rank has such gradients."""
    if not any(outcome.status.spoiled):
        return
    spoiled = outcome.status.ranks(Standing.SPOILED)
    reaction(
        NonFinite(
            outcome.number, tuple(ranks[r] for r in spoiled), tuple(reversed(outcome.spoiled))
        )
    )


class _Warning:
    """Says it once."""

    def __init__(self) -> None:
        self._said = False

    def __call__(self, found: NonFinite) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"{found}; they are in everybody's averages now. Later ones are not reported: say nonfinite='raise' or 'skip' to do something "
                "about them, 'ignore' if a gradient scaler does",
                RuntimeWarning,
                stacklevel=2,
            )


def _raise(found: NonFinite) -> None:
    msg = (
        f"expected finite gradients, found that {found}: look at that rank's batch, lower the learning rate or clip; "
        "parameters have not been changed in this step"
    )
    raise NonFiniteError(msg)


class _Skip:
    """Drops gradients; says so at the first time, and when it does nothing else any more."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._num_skipped = 0
        self._row = range(0)  # steps that have been skipped one after the other

    def __call__(self, found: NonFinite) -> None:
        for param in self._parameters:
            param.grad = None
        self._num_skipped += 1
        goes_on = found.step == self._row.stop
        self._row = range(self._row.start if goes_on else found.step, found.step + 1)
        if len(self._row) == MANY:
            warnings.warn(
                f"{found}, the {MANY}th step in a row that is skipped: training does not go on; lower the learning rate, clip, or look at the "
                "parameters, which may be NaN themselves",
                RuntimeWarning,
                stacklevel=2,
            )
        elif self._num_skipped == 1:
            warnings.warn(
                f"{found}; the step is skipped. Later ones are not reported, but for {MANY} in a row",
                RuntimeWarning,
                stacklevel=2,
            )
