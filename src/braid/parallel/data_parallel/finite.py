"""Reactions to NaN and infinite gradients: once per step, the same on all ranks, with names.

Problem: after an average, the NaN of one rank is in the gradients of all ranks, and the rank and
the parameter that caused it are unknown.

Idea: every rank checks its gradients before they are sent (one number of each, or all), and sends
the result with them (`gradients.status`). So all ranks know the step, the ranks and the parameters,
and react in the same way. Methods that average parameters instead of gradients check the averages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from braid.comm import Group
from braid.errors import BraidError, ConfigError
from braid.parallel.gradients import AveragingOutcome, RankState
from braid.types import first_few, ranks_text

__all__ = [
    "CHOICES",
    "FiniteCheck",
    "NonFinite",
    "NonFiniteError",
    "NonfiniteHandler",
    "handle_nonfinite",
    "nonfinite_handler",
]

MANY = 10  # skipped steps in a row that indicate a lasting problem


class NonFinite(NamedTuple):
    """Gradients that are NaN or infinite.

    Attributes:
        step: Number of the averaging, from 1.
        ranks: Global ranks that have them.
        parameters: Names of the parameters, last of the module first, since a NaN spreads from the
            loss towards the inputs.
    """

    step: int
    ranks: tuple[int, ...]
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        names = first_few(map(repr, self.parameters), 5)
        ranks = ranks_text(self.ranks) if self.ranks else "a rank that has joined"
        return f"gradients of {names} are NaN or infinite on {ranks} in step {self.step}"


class NonFiniteError(BraidError, ArithmeticError):
    """Gradients are not finite; raised on all ranks."""


NonfiniteHandler = Callable[[NonFinite], None]
CHOICES = ("ignore", "warn", "raise", "skip")
AVERAGE_CHOICES = CHOICES[:3]  # averages of parameters cannot be skipped


def nonfinite_handler(
    choice: str | NonfiniteHandler, parameters: Sequence[torch.Tensor]
) -> NonfiniteHandler:
    """Return the handler for a user's choice.

    Args:
        choice: "ignore"; "warn", once; "raise" NonFiniteError; "skip": leave all gradients None,
            so that the optimizer does nothing, and warn of the first step and of many in a row;
            or a function.
        parameters: Parameters; "skip" drops their gradients.

    Raises:
        ConfigError: The choice is not one of these.
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
    """Call `handler` if gradients of any rank are not finite.

    Args:
        outcome: Outcome of an averaging.
        ranks: Global ranks of the group.
        handler: Called on all ranks.
    """
    if not any(outcome.status.nonfinite):
        return
    nonfinite_ranks = tuple(ranks[rank] for rank in outcome.status.ranks(RankState.NONFINITE))
    handler(NonFinite(outcome.number, nonfinite_ranks, tuple(reversed(outcome.nonfinite))))


class _WarnOnce:
    """Handler that warns about the first step only."""

    def __init__(self) -> None:
        self._warned = False

    def __call__(self, cause: NonFinite) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{cause}; the averaged gradients of all ranks contain them now. Later steps are "
                "not reported: choose nonfinite='raise' or 'skip' to react to them, 'ignore' if "
                "a gradient scaler does",
                RuntimeWarning,
                stacklevel=2,
            )


def _raise(cause: NonFinite) -> None:
    msg = (
        f"{cause}. Parameters have not been changed in this step: check the batch of that rank, "
        "lower the learning rate or clip gradients"
    )
    raise NonFiniteError(msg)


class _Skip:
    """Handler that drops gradients, and warns at the first step and after `MANY` in a row."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._num_skipped = 0
        self._row = range(0)  # consecutive skipped steps

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
                f"{cause}; the step is skipped. Later steps are not reported, unless {MANY} in a "
                "row are skipped",
                RuntimeWarning,
                stacklevel=2,
            )


class FiniteCheck:
    """Check of parameter averages that names NaN or infinite parameters before they are replaced.

    An average is not finite if the share of any rank is not finite. So every rank detects it in its
    copy of the average; only then do ranks exchange which of their parameters are not finite.

    Args:
        nonfinite: "ignore", "warn" (once) or "raise", the same on all ranks.
        method: Name of the method that averages, for messages.

    Raises:
        ConfigError: `nonfinite` is something else.

    Cost:
        A pass over the average; if it is not finite, a pass over the parameters and an all_gather
        of a byte per parameter.
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
                f"{cause}. The parameters were not averaged: each rank still has its own values. "
                "Look at the batches of that rank, lower the learning rate or clip gradients"
            )
            raise NonFiniteError(msg)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{cause}; the averaged parameters of all ranks contain it now. Later steps are "
                "not reported: nonfinite='raise' stops before that, 'ignore' turns the check off",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_finite(flat: torch.Tensor) -> bool:
    total = flat.sum(dtype=torch.promote_types(flat.dtype, torch.float32))
    return bool(total.isfinite()) or bool(flat.isfinite().all())  # the sum may overflow


def _cause(params: Sequence[torch.Tensor], group: Group) -> str:
    """Describe which parameters are not finite on which ranks; a collective."""
    flags = [not bool(param.isfinite().all()) for param in params]
    flags_tensor = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    table = group.all_gather(flags_tensor).view(group.size, -1)
    ranks = [str(group.ranks[int(row)]) for row in table.any(1).nonzero()]
    positions = [int(column) for column in table.any(0).nonzero()]
    if not ranks:
        return "the average is not finite although the parameters of every rank are"
    names = [f"{position} of shape {list(params[position].shape)}" for position in positions]
    plural = "s" if len(ranks) > 1 else ""
    where = f"on rank{plural} {', '.join(ranks)}"
    return f"NaN or infinity in parameter {first_few(names, 5)} {where}"
