"""All parameters as one flat tensor per dtype and device, for methods that exchange parameters.

Unlike gradients, parameters belong to the user and keep their memory; they are copied out,
exchanged in few long messages, and copied back.

Cost: memory for one copy of the parameters; two passes over them per exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from braid.comm import Group, StepsBy
from braid.errors import ConfigError
from braid.parallel.data_parallel.finite import FiniteCheck
from braid.parallel.gradients import FlatBuffer, ParamTable, allocator
from braid.parallel.gradients.lost_requests import reclaim_lost_requests

__all__ = ["FlatParams", "Params", "make_equal", "mean", "parameters_in"]

Params = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]


class FlatParams:
    """Parameters, and memory for a flat copy of them.

    Args:
        params: Parameters in the same order on all ranks.
        group: Ranks that exchange the copies.

    Attributes:
        params: Parameters in the same order on all ranks.
        flats: Copies, one for each dtype and device.
    """

    def __init__(self, params: Sequence[torch.Tensor], group: Group) -> None:
        self.params = tuple(params)
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for param in self.params:
            kinds.setdefault((param.dtype, param.device), []).append(param)
        self._members = list(kinds.values())
        self._buffers = [
            FlatBuffer([p.shape for p in members], dtype, allocator(group, str(device)))
            for (dtype, device), members in kinds.items()
        ]
        self.flats = [buffer.tensor for buffer in self._buffers]

    def holds(self, params: Sequence[torch.Tensor]) -> bool:
        """Return whether `params` are exactly the parameters of the flat copy."""
        same = len(params) == len(self.params)
        return same and all(a is b for a, b in zip(params, self.params, strict=True))

    @classmethod
    def agreed(
        cls, params: Sequence[nn.Parameter], group: Group, **arguments: object
    ) -> FlatParams:
        """Compare parameters and arguments across the group, and make flat copies; a collective.

        Raises:
            MismatchError: Parameters or their order differ between ranks; the message shows where.
        """
        named = ((str(number), param) for number, param in enumerate(params))
        ParamTable.named(named).compare(group, arguments)
        reclaim_lost_requests(group)
        return cls(params, group)

    @torch.no_grad()
    def read(self) -> list[torch.Tensor]:
        """Copy the parameters to `flats`, and return `flats`."""
        for param, view in self._pairs():
            view.copy_(param)
        return self.flats

    @torch.no_grad()
    def write(self) -> None:
        """Copy `flats` to the parameters."""
        for param, view in self._pairs():
            param.copy_(view)

    def views(self) -> list[list[torch.Tensor]]:
        """Return views with the parameters' shapes, grouped by flat copy."""
        return [buffer.views for buffer in self._buffers]

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for members, buffer in zip(self._members, self._buffers, strict=True):
            yield from zip(members, buffer.views, strict=True)

    def __repr__(self) -> str:
        return (
            f"FlatParams({len(self.params)} parameters, {sum(f.nbytes for f in self.flats)} bytes)"
        )


def parameters_in(params: Params) -> list[nn.Parameter]:
    """Return the parameters that require a gradient, without duplicates.

    Args:
        params: Parameters, or parameter groups of an optimizer.

    Raises:
        ConfigError: `params` contains anything else, or no parameter requires a gradient.
    """
    required: list[nn.Parameter] = []
    for item in params:
        members = item["params"] if isinstance(item, Mapping) else [item]
        strangers = [x for x in members if not isinstance(x, torch.Tensor)]
        if strangers:
            msg = (
                f"a {type(strangers[0]).__name__} is not a parameter: pass model.parameters(), or "
                "an optimizer's param_groups"
            )
            raise ConfigError(msg)
        required += [param for param in members if param.requires_grad]
    if not required:
        msg = (
            "no parameter requires a gradient: pass model.parameters() again, an iterator can be "
            "used only once"
        )
        raise ConfigError(msg)
    return list(dict.fromkeys(required))


def mean(flat: FlatParams, group: Group, check: FiniteCheck, step: int) -> None:
    """Replace the parameters by their mean over `group`; a collective.

    Args:
        flat: The parameters.
        group: Ranks that average.
        check: Check of the averages for NaN and infinity.
        step: Number of the step, for messages.

    Raises:
        NonFiniteError: An average is not finite, and `check` raises.

    Cost: 2 (n-1)/n l bytes sent per rank, with n ranks and l bytes of parameters.
    """
    flats = flat.read()
    with group.coalesce(steps_by=StepsBy.WAITER) as batch:
        for tensor in flats:
            batch.all_reduce(tensor, "avg")
    batch.work.wait()
    check(flats, flat.params, group, step)
    flat.write()


def make_equal(flat: FlatParams, group: Group) -> None:
    """Copy the parameter values of the group's first rank to all ranks; a collective."""
    for tensor in flat.read():
        group.broadcast(tensor, 0)
    flat.write()
