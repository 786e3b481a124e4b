"""Reactions to NaN and infinity: once per step, the same on all ranks, by name.

Problem: a NaN on one rank is in everybody's average a moment later, and nobody can say whose it
was.

Idea: every rank looks at its own gradients before they are sent (one number of each, or all), and
reports the result beside them (`gradients.status`). So all ranks know the step, the ranks and the
parameters, and react alike. Methods that average parameters instead of gradients have a check of
the averages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from braid.comm import Group
from braid.errors import BraidError, ConfigError
from braid.parallel.gradients import AveragingOutcome, RankState
from braid.types import first_few

__all__ = [
    "CHOICES",
    "FiniteCheck",
    "NonFinite",
    "NonFiniteError",
    "NonfiniteHandler",
    "handle_nonfinite",
    "nonfinite_handler",
]

MANY = 10  # steps in a row that are skipped: no accident any more


class NonFinite(NamedTuple):
    """Gradients that are NaN or infinite.

    Attributes:
        step: Number of the averaging, from 1.
        ranks: Global ranks that have them.
        parameters: Names of the parameters, the last of the module first: a NaN spreads from the
            loss towards the inputs.
    """

    step: int
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        names = first_few(map(repr, self.parameters), 5)
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        ranks = ranks if self.ranks else "a rank that has joined"
        return f"gradients of {names} are NaN or infinite on {ranks} in step {self.step}"


class NonFiniteError(BraidError, ArithmeticError):
    """Gradients are not finite; raised on all ranks."""


NonfiniteHandler = Callable[[NonFinite], None]
CHOICES = ("ignore", "warn", "raise", "skip")
AVERAGE_CHOICES = CHOICES[:3]  # averages of parameters cannot be skipped


def nonfinite_handler(
    choice: str | NonfiniteHandler, parameters: Sequence[torch.Tensor]
) -> NonfiniteHandler:
    """Return the handler that a user's choice means.

    Args:
        choice: "ignore"; "warn", once; "raise" NonFiniteError; "skip": leave all gradients None,
            so that the optimizer does nothing, and warn of the first step and of many in a row;
            or a function.
        parameters: Parameters whose gradients "skip" drops.

    Raises:
        ConfigError: The choice is none of these.
    """
    if callable(choice):
        return choice
    if choice not in CHOICES:
        known = ", ".join(map(repr, CHOICES))
        msg = f"nonfinite={choice!r} is unknown: choose one of {known}, or pass a function"
        raise ConfigError(msg)
    known_handlers: dict[str, NonfiniteHandler] = {
        "ignore": lambda _: None,
        "warn": _WarnOnce(),
        "raise": _raise,
        "skip": _Skip(parameters),
    }
    return known_handlers[choice]


def handle_nonfinite(
    outcome: AveragingOutcome, ranks: tuple[int, ...], handler: NonfiniteHandler
) -> None:
    """Call `handler` if gradients of some rank are not finite.

    Args:
        outcome: Outcome of an averaging.
        ranks: Global ranks of the group.
        handler: Called on all ranks.
    """
    if not any(outcome.status.nonfinite):
        return
    own = tuple(ranks[rank] for rank in outcome.status.ranks(RankState.NONFINITE))
    handler(NonFinite(outcome.number, own, tuple(reversed(outcome.nonfinite))))


class _WarnOnce:
    """Warns of the first step."""

    def __init__(self) -> None:
        self._warned = False

    def __call__(self, cause: NonFinite) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{cause}; they are in everybody's averages now. Later ones are not reported: "
                "choose nonfinite='raise' or 'skip' to react to them, 'ignore' if a gradient "
                "scaler does",
                RuntimeWarning,
                stacklevel=2,
            )


def _raise(cause: NonFinite) -> None:
    msg = (
        f"{cause}. Look at the batch of that rank, lower the learning rate or clip gradients; "
        "parameters have not been changed in this step"
    )
    raise NonFiniteError(msg)


class _Skip:
    """Drops gradients; warns of the first step, and when every step is skipped."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._num_skipped = 0
        self._row = range(0)  # steps that have been skipped one after the other

    def __call__(self, cause: NonFinite) -> None:
        for param in self._parameters:
            param.grad = None
        self._num_skipped += 1
        is_next = cause.step == self._row.stop
        self._row = range(self._row.start if is_next else cause.step, cause.step + 1)
        if len(self._row) == MANY:
            warnings.warn(
                f"{cause}, the {MANY}th step in a row that is skipped: training stands still. "
                "Lower the learning rate, clip gradients, or look at the parameters, which may be "
                "NaN themselves",
                RuntimeWarning,
                stacklevel=2,
            )
        elif self._num_skipped == 1:
            warnings.warn(
                f"{cause}; the step is skipped. Later ones are not reported, but for {MANY} in a "
                "row",
                RuntimeWarning,
                stacklevel=2,
            )


class FiniteCheck:
    """Names the parameters that are NaN or infinite, before an average replaces them.

    An average is not finite if the share of any rank is not. So all ranks see it in their own
    copy of the average, and only then ask each other whose share it was.

    Args:
        nonfinite: "ignore", "warn" (once) or "raise", the same on all ranks.
        method: Name of the method that averages, for messages.

    Raises:
        ConfigError: `nonfinite` is something else.

    Cost:
        A pass over the average; where it is not finite, one over the parameters and an
        all_gather of a byte for each parameter.
    """

    def __init__(self, nonfinite: str, method: str) -> None:
        if nonfinite not in AVERAGE_CHOICES:
            known = ", ".join(map(repr, AVERAGE_CHOICES))
            msg = f"nonfinite={nonfinite!r} is unknown to {method}; choose one of {known}"
            raise ConfigError(msg)
        self.nonfinite = nonfinite
        self._method = method
        self._warned = False

    def __call__(
        self,
        averages: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        group: Group,
        step: int,
    ) -> None:
        """Check averages that have not been written to the parameters; a collective if one fails.

        Raises:
            NonFiniteError: An average is not finite, and `nonfinite` is "raise".
        """
        if self.nonfinite == "ignore" or all(map(_is_finite, averages)):
            return
        cause = f"{_cause(params, group)} in step {step} of {self._method}"
        if self.nonfinite == "raise":
            msg = (
                f"{cause}. No parameter has been changed: each rank still has its own. Look at "
                "the batches of that rank, lower the learning rate or clip gradients"
            )
            raise NonFiniteError(msg)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{cause}; the averaged parameters of all ranks contain it now. Later ones are "
                "not reported: nonfinite='raise' stops before that, 'ignore' turns the check off",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_finite(flat: torch.Tensor) -> bool:
    total = flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32))
    return bool(total.isfinite()) or bool(flat.isfinite().all())  # a sum may overflow


def _cause(params: Sequence[torch.Tensor], group: Group) -> str:
    """Describe which parameters are not finite on which ranks; a collective."""
    flags = [not bool(param.isfinite().all()) for param in params]
    own = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    table = group.all_gather(own).view(group.size, -1)
    ranks = [str(group.ranks[int(row)]) for row in table.any(1).nonzero()]
    positions = [int(column) for column in table.any(0).nonzero()]
    if not ranks:
        return "the average is not finite although the parameters of every rank are"
    names = [f"{position} of shape {list(params[position].shape)}" for position in positions]
    plural = "s" if len(ranks) > 1 else ""
    where = f"on rank{plural} {', '.join(ranks)}"
    return f"NaN or infinity in parameter {first_few(names, 5)} {where}"
