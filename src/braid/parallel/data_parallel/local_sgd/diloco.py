"""DiLoCo: hundreds of steps on each rank alone, then one step of an outer optimizer on their mean.

Problem: averaging models (`averaging`) stops working when ranks take many steps in between: the
average of distant models is worse than each of them.

Idea: the mean over ranks of the change since parameters were last equal is treated as a gradient,
and an outer optimizer with momentum applies it:

    start   the same parameters on all ranks
    x       each rank: `period` steps of the inner optimizer from start, on its own data
    d       = mean over ranks of (start - x)
    m       = momentum m + d;    start = start - lr (d + momentum m);    x = start       (Nesterov)

With lr=1 and momentum=0 it is local SGD.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
algorithm 1; lr 0.7 and momentum 0.9 are the paper's. Inner optimizers keep their state through
outer steps, as in the paper.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from braid.comm import StepsBy
from braid.errors import ConfigError
from braid.parallel.data_parallel.finite import FiniteCheck
from braid.parallel.data_parallel.flat_params import FlatParams, make_equal, parameters_in
from braid.parallel.data_parallel.step_counts import is_whole
from braid.parallel.data_parallel.wrapped_optimizer import WrappedOptimizer
from braid.parallel.gradients.process_groups import group_of
from braid.runtime.tensor_buffers import bytes_of

__all__ = ["DiLoCo"]

KEY = "diloco"


class DiLoCo(WrappedOptimizer):
    """Optimizer that takes inner steps, and an outer step in every `period`-th step.

    The module is used unwrapped, without DistributedDataParallel. At the beginning rank 0's
    parameters that require a gradient are copied to all ranks. Frozen parameters, and buffers such
    as running means, may differ between ranks. All ranks take the same number of steps
    (`WrappedOptimizer`).

    Args:
        optim: Inner optimizer, over the same parameters on all ranks.
        period: Number of inner steps per outer step.
        lr: Learning rate of the outer optimizer.
        momentum: Momentum of the outer optimizer.
        nesterov: Whether the outer step uses Nesterov momentum.
        wire: Format in which changes cross a network, such as bf16 or int8; its error is added to
            the next change. For float32 parameters only.
        process_group: Group, as for DistributedDataParallel.
        nonfinite: Reaction to NaN and infinity in parameters: "ignore"; "warn", once; or "raise" on
            all ranks, before an outer step is taken.

    Raises:
        ConfigError: No group exists, or a number is out of range.
        MismatchError: Parameters or their order differ between ranks.

    Cost:
        2 (n-1)/n l bytes per rank in every `period`-th step; memory for three more copies of the
        parameters.
    """

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        *,
        period: int = 500,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        wire: str | None = None,
        process_group: Any = None,
        nonfinite: str = "warn",
    ) -> None:
        super().__init__(optim)
        if not is_whole(period, 1) or not 0 < lr < float("inf") or not 0 <= momentum < 1:
            msg = (
                "DiLoCo needs an integer of at least 1 as period, a positive lr and a momentum "
                f"from 0 to below 1 for the outer steps, got period={period!r}, lr={lr!r}, "
                f"momentum={momentum!r}"
            )
            raise ConfigError(msg)
        self.process_group = group = group_of(process_group)
        self.period = period
        self._check = FiniteCheck(nonfinite, "DiLoCo")
        self.num_steps = 0
        self._lr, self._momentum, self._nesterov = lr, momentum, nesterov
        self._deltas = FlatParams.agreed(
            parameters_in(optim.param_groups), group, period=period, wire=wire, nonfinite=nonfinite
        )
        local_params = [flat.clone() for flat in self._deltas.read()]
        make_equal(self._deltas, group)
        moved = not all(map(torch.equal, local_params, self._deltas.flats))
        self._replaced = local_params if moved else None  # until the first step
        self._just_averaged = True  # all ranks have the same parameters
        self._starts = [flat.clone() for flat in self._deltas.flats]
        self._moments = [torch.zeros_like(flat) for flat in self._deltas.flats]
        self._residuals = [
            torch.zeros_like(flat[:0]) for flat in self._deltas.flats
        ]  # of a checkpoint
        self._requests = [
            group.persistent(
                "all_reduce", flat, op="avg", wire=wire if flat.dtype == torch.float32 else None
            )
            for flat in self._deltas.flats
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an inner step; every `period`-th call also takes an outer step, a collective.

        Args:
            closure: Function that computes the loss again and returns it; None without one.

        Raises:
            ConfigError: Parameters have been unfrozen or added since this optimizer was made.
            NonFiniteError: Parameters are NaN or infinite on a rank, and `nonfinite` is "raise";
                the inner step has been taken.
        """
        for group in self.param_groups:
            _refuse_others(self._deltas, group["params"])
        self._replaced = None
        self._just_averaged = False
        loss = self.optim.step(closure)
        self.num_steps += 1
        if self.num_steps % self.period == 0:
            with torch.no_grad():
                self._outer_step()
        return loss

    def _outer_step(self) -> None:
        flats = self._deltas.read()
        for flat, start, residual in zip(flats, self._starts, self._residuals, strict=True):
            torch.sub(start, flat, out=flat)
            flat[: residual.numel()].add_(residual)
        self._residuals = [residual[:0] for residual in self._residuals]
        for work in [request.start(steps_by=StepsBy.WAITER) for request in self._requests]:
            work.wait()
        self._check(flats, self._deltas.params, self.process_group, self.num_steps)
        for delta, start, moment in zip(flats, self._starts, self._moments, strict=True):
            moment.mul_(self._momentum).add_(delta)
            if self._nesterov:
                delta.add_(moment, alpha=self._momentum)
            else:
                delta.copy_(moment)
            start.sub_(delta, alpha=self._lr)
            delta.copy_(start)
        self._deltas.write()
        self._just_averaged = True

    def is_own(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether the tensor `name` of a checkpoint may differ between ranks.

        The start and momentum of the outer optimizer are the same on all ranks, and so are the
        averaged parameters right after an outer step.
        """
        outer = (f"optimizer_state_dict/{KEY}/{part}/" for part in ("start", "momentum"))
        equal = self._just_averaged and any(tensor is p for p in self._deltas.params)
        return not (equal or name.startswith(tuple(outer)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, with the outer state under `diloco`.

        The outer state has the parameters at the last outer step, momentum, and the error of the
        wire format. That error differs between ranks, like the inner state (`is_own`).
        """
        residuals = [
            loaded.clone() if (residual := request.residual()) is None else residual
            for request, loaded in zip(self._requests, self._residuals, strict=True)
        ]
        outer = {
            "num_steps": self.num_steps,
            "start": [start.clone() for start in self._starts],
            "momentum": [moment.clone() for moment in self._moments],
            "residual": residuals,
            "checksum": _checksum(self._deltas.read()),
        }
        return {**self.optim.state_dict(), KEY: outer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of `state_dict`; the program loads the parameters itself.

        The constructor copies rank 0's parameters. If the program loaded parameters before that,
        this method restores them on this rank.

        Raises:
            ConfigError: The state belongs to another optimizer or model.
        """
        outer = state_dict.get(KEY)
        numels = [start.numel() for start in outer["start"]] if outer else None
        if outer is None or numels != [start.numel() for start in self._starts]:
            kind = f"DiLoCo for {sum(numels or [])} numbers" if outer else "an inner optimizer only"
            msg = (
                f"the state belongs to {kind}, so it cannot be loaded for {self._deltas!r}: use "
                "the same optimizer as in the saved run"
            )
            raise ConfigError(msg)
        self.optim.load_state_dict({k: v for k, v in state_dict.items() if k != KEY})
        self.num_steps = outer["num_steps"]
        self._just_averaged = False  # parameters may differ between ranks
        self._give_back(outer.get("checksum"))
        for kept, loaded in ((self._starts, outer["start"]), (self._moments, outer["momentum"])):
            for into, x in zip(kept, loaded, strict=True):
                into.copy_(x)
        for request in self._requests:
            request.reset_residual()
        self._residuals = [
            x.to(flat) for x, flat in zip(outer["residual"], self._deltas.flats, strict=True)
        ]

    def _give_back(self, checksum: torch.Tensor | None) -> None:
        """Restore the parameters from before the copy of rank 0's, if the state belongs to them."""
        local_params, self._replaced = self._replaced, None
        if (
            local_params is None
            or checksum is None
            or not torch.equal(_checksum(local_params), checksum.cpu())
        ):
            return
        for flat, values in zip(self._deltas.flats, local_params, strict=True):
            flat.copy_(values)
        self._deltas.write()


def _checksum(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one checksum of this rank's values for each of `flats`."""
    checksums = [zlib.crc32(bytes_of(flat)) for flat in flats]
    return torch.tensor(checksums, device="cpu")


def _refuse_others(flat: FlatParams, params: Sequence[torch.Tensor]) -> None:
    """Raise if `params` has parameters that were added or unfrozen after `flat` was made."""
    known = set(map(id, flat.params))
    others = [
        tuple(param.shape) for param in params if param.requires_grad and id(param) not in known
    ]
    if others:
        msg = (
            f"parameters of shapes {', '.join(map(str, others[:8]))} were unfrozen or added "
            "after DiLoCo was made, and would not be averaged: make a new DiLoCo on all ranks"
        )
        raise ConfigError(msg)
