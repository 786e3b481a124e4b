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
        wanted: ignore; warn, once; raise NonFiniteError; skip: leave all gradients None, so that the optimizer does nothing; or what
            shall be called, such as a `Rollback`.
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
        "skip": lambda _: _drop(parameters),
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


def _drop(parameters: Sequence[torch.Tensor]) -> None:
    for param in parameters:
        param.grad = None
