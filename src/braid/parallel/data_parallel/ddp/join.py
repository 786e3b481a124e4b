"""Uneven inputs: a rank without input shadows the steps of other ranks until no rank has input.

Names and behavior follow `torch.distributed.algorithms.join`. A rank that leaves the context
*joins*. From then on it takes part in the collectives of the other ranks' steps, which its
joinables shadow (`JoinHook.main_hook`), until all ranks have joined. A single joinable that detects
itself whether other ranks still work needs no additional message (`JoinHook.shadow`;
DistributedDataParallel exchanges this with its gradients). Several joinables need one small
all-reduce per step, in which working ranks announce a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

from braid.comm import Group, Work
from braid.errors import CommError, ConfigError
from braid.parallel.data_parallel.sync_batch_norm import SyncBatchNorm

__all__ = ["EARLY", "Join", "JoinHook", "Joinable", "syncs_in_forward"]

EARLY = (
    "a rank has no more input while others have (throw_on_early_termination=True): give all ranks "
    "the same number of batches, or let the others go on"
)

# contexts that a program has entered, by group
_ENTERED: WeakKeyDictionary[Group, ReferenceType[Join]] = WeakKeyDictionary()


class JoinHook:
    """Actions for one `Joinable` on a rank that has joined, which means it has no more inputs."""

    def main_hook(self) -> None:
        """Take part in the collectives of one step of the ranks that still have inputs."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Do final work; called once on every rank when all ranks have joined.

        Args:
            is_last_joiner: Whether this rank was among the last ranks with input.
        """

    def shadow(self) -> bool | None:
        """Take part in one step of the ranks that still have inputs, and detect when none has.

        Returns:
            True after a step, False if all ranks have joined. None if the object's steps do not
            show whether other ranks work.
        """
        return None

    def refusal(self) -> str | None:
        """Return why this rank cannot take part in steps without input; None if it can."""
        return None


class Joinable(ABC):
    """Object that takes part in collectives once per step."""

    @abstractmethod
    def __init__(self) -> None:
        self._join: Join | None = None

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the actions for this object after the rank has joined.

        Args:
            **kwargs: Keyword arguments of `Join`.
        """

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Device on which the joinable communicates."""

    @property
    @abstractmethod
    def join_process_group(self) -> Group:
        """Group in which the joinable communicates."""


class Join:
    """Context in which ranks may have different numbers of inputs.

    Args:
        joinables: Objects of one group that take part in collectives. Each calls
            `notify_join_context` before the collectives of a step. The collectives of a
            DistributedDataParallel are in backwards that average.
        enable: Whether the context has an effect; False is for inputs that are known to be even.
        throw_on_early_termination: Whether to raise on all ranks as soon as one has no more input.
        **kwargs: Keyword arguments for all join hooks.

    Raises:
        ConfigError: `joinables` is empty, contains anything but Joinables, or has one twice. Or
            they have different groups, one is in another such context, or steps cannot be shadowed.
        CommError: A rank has no more input, and `throw_on_early_termination` is set.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        _check_joinables(joinables)
        groups = {id(joinable.join_process_group) for joinable in joinables}
        if len(groups) > 1:
            msg = (
                f"the joinables use {len(groups)} process groups: enter one Join context per group"
            )
            raise ConfigError(msg)
        self.throws = throw_on_early_termination
        self._joinables = tuple(joinables)
        self._enable = enable
        self._hooks = [joinable.join_hook(**kwargs) for joinable in joinables]
        # for callers without a type checker
        odd = [hook for hook in self._hooks if not isinstance(hook, JoinHook)]  # type: ignore[redundant-expr]
        if odd:
            msg = f"join_hook() of every joinable must return a JoinHook, got {odd[0]!r}"
            raise ConfigError(msg)
        refusal = next(filter(None, (hook.refusal() for hook in self._hooks)), None)
        if enable and not self.throws and refusal is not None:
            raise ConfigError(refusal)
        self._group = joinables[0].join_process_group
        self._device = joinables[0].join_device

    @property
    def exchanges_presence(self) -> bool:
        """Whether the steps themselves show if other ranks work, so that no message is needed."""
        alone = len(self._hooks) == 1 and not self.throws
        return alone and type(self._hooks[0]).shadow is not JoinHook.shadow

    def __enter__(self) -> Join:
        if self._enable and self._entered() is not None:
            msg = (
                "a Join context of this group is already active, and a group can have only one "
                "at a time: pass all joinables to one context, Join([a, b])"
            )
            raise ConfigError(msg)
        if self._enable:
            _ENTERED[self._group] = ref(self)
        for joinable in self._joinables:
            joinable._join = self if self._enable else None  # noqa: SLF001 - the other half
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for joinable in self._joinables:
            joinable._join = None  # noqa: SLF001 - the other half
        if self._entered() is self:
            del _ENTERED[self._group]
        if not self._enable or kind is not None:
            return
        num_shadowed = 0
        while self._shadow():
            num_shadowed += 1
        for hook in self._hooks:
            hook.post_hook(is_last_joiner=not num_shadowed)

    def _entered(self) -> Join | None:
        """Return the context of this group that the program has entered, if any."""
        reference = _ENTERED.get(self._group)
        return None if reference is None else reference()

    def _shadow(self) -> bool:
        """Shadow one step of the working ranks; return False if all ranks have joined."""
        if self.exchanges_presence:
            return bool(self._hooks[0].shadow())
        working = torch.zeros(1, device=self._device)
        self._group.all_reduce(working)
        if not working.item():
            return False
        if self.throws:
            raise CommError(EARLY)
        for hook in self._hooks:
            hook.main_hook()
        return True

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """Announce to other ranks that this rank has inputs; call it before a step's collectives.

        Returns:
            The announcement in flight. None outside of a context, for all joinables but the first,
            and if no message is needed.
        """
        join = joinable._join  # noqa: SLF001 - the other half
        if join is None or joinable is not join._joinables[0] or join.exchanges_presence:  # noqa: SLF001
            return None
        working = torch.ones(1, device=join._device)  # noqa: SLF001
        if join.throws:
            join._group.all_reduce(working)  # noqa: SLF001
            if working.item() < join._group.size:  # noqa: SLF001
                raise CommError(EARLY)
            return None
        work: Work = join._group.all_reduce(working, async_op=True)  # noqa: SLF001
        return work


def _check_joinables(joinables: Sequence[Joinable]) -> None:
    if not isinstance(joinables, Sequence) or not joinables:  # type: ignore[redundant-expr]
        msg = f"Join takes a list of at least one joinable, got {joinables!r}"
        raise ConfigError(msg)
    for joinable in joinables:
        if not isinstance(joinable, Joinable) or not hasattr(joinable, "_join"):  # type: ignore[redundant-expr]
            kind = type(joinable).__name__
            is_joinable = isinstance(joinable, Joinable)
            problem = "has not called Joinable.__init__" if is_joinable else "is not a Joinable"
            msg = f"{kind} {problem}: derive from Joinable, and call its __init__"
            raise ConfigError(msg)
    if len({id(joinable) for joinable in joinables}) < len(joinables):
        msg = f"some of the {len(joinables)} joinables are identical: pass each once"
        raise ConfigError(msg)


def syncs_in_forward(module: nn.Module) -> str | None:
    """Return why a rank without input cannot take part in a module's steps; None if it can."""
    for name, part in module.named_modules():
        if isinstance(part, SyncBatchNorm | nn.SyncBatchNorm) and part.training:
            return (
                f"the forward of {type(part).__name__} {name!r} waits for other ranks, so a rank "
                "without input would block it: give all ranks the same number of batches, pass "
                "throw_on_early_termination=True, or use BatchNorm"
            )
    return None
