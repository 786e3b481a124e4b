"""Ranks that run out of input earlier than others: those help, with nothing of their own, until all are through.

Names and behaviour are those of `torch.distributed.algorithms.join`. A rank that leaves the context *joins*: it takes part in the collectives
of the others' steps, which its joinables shadow (`JoinHook.main_hook`), until nobody works any more. One that is alone in its context and
knows by itself whether others still work needs nothing else for that (`JoinHook.shadow`; DistributedDataParallel says it beside its
gradients). Several need one small all-reduce a step, by which those that work say so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn

from braid.comm import Group, Work
from braid.data_parallel.sync_batch_norm import SyncBatchNorm
from braid.errors import CommError, ConfigError

__all__ = ["EARLY", "Join", "JoinHook", "Joinable", "syncs_in_forward"]

EARLY = (
    "expected inputs on all ranks as long as on one, found that a rank has no more (throw_on_early_termination=True): give all ranks equally "
    "many batches, or let the others go on"
)

# what a program has entered, by group
_ENTERED: WeakKeyDictionary[Group, ReferenceType[Join]] = WeakKeyDictionary()


class JoinHook:
    """What a rank that has joined does for one joinable."""

    def main_hook(self) -> None:
        """Shadow the collectives of one step of the others."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called once on all ranks when all have joined.

        Args:
            is_last_joiner: Whether this rank was among the last that worked.
        """

    def shadow(self) -> bool | None:
        """Shadow one step of the others if they still work; None when this joinable cannot tell."""
        return None

    def refusal(self) -> str | None:
        """Why others' steps cannot be shadowed; None if they can."""
        return None


class Joinable(ABC):
    """Something that takes part in collectives once a step."""

    @abstractmethod
    def __init__(self) -> None:
        self._join: Join | None = None

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What to do after this rank has joined; keywords are those of `Join`."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Where it communicates."""

    @property
    @abstractmethod
    def join_process_group(self) -> Group:
        """With whom it communicates."""


class Join:
    """Context in which ranks may have different numbers of inputs.

    Args:
        joinables: What takes part in collectives; all of one group, and each calls `notify_join_context` before those of a step. Those of
            a DistributedDataParallel are in backwards that average, all others have none.
        enable: False makes it do nothing, for inputs that are known to be even.
        throw_on_early_termination: Raise on all ranks as soon as one has no more input.
        **kwargs: Handed to all join hooks.

    Raises:
        ConfigError: No joinables, or something else, one twice, or one in another such context, or of different groups, or one whose steps cannot be shadowed, and nothing shall be thrown.
        CommError: A rank has no more input, and that shall be raised.
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
            msg = f"expected joinables of one group, found {len(groups)} groups"
            raise ConfigError(msg)
        self.throws = throw_on_early_termination
        self._joinables = tuple(joinables)
        self._enable = enable
        self._hooks = [joinable.join_hook(**kwargs) for joinable in joinables]
        odd = [hook for hook in self._hooks if not isinstance(hook, JoinHook)]  # type: ignore[redundant-expr]  # users without a type checker
        if odd:
            msg = f"expected a JoinHook from join_hook() of every joinable, found {odd[0]!r}"
            raise ConfigError(msg)
        refusal = next(filter(None, (hook.refusal() for hook in self._hooks)), None)
        if enable and not self.throws and refusal is not None:
            raise ConfigError(refusal)
        self._group = joinables[0].join_process_group
        self._device = joinables[0].join_device

    @property
    def tells_by_itself(self) -> bool:
        """Whether the only joinable knows by itself, in the middle of a step, whether others work; too late to throw."""
        alone = len(self._hooks) == 1 and not self.throws
        return alone and type(self._hooks[0]).shadow is not JoinHook.shadow

    def __enter__(self) -> Join:
        if self._enable and self._entered() is not None:
            msg = (
                "expected one join context of a group at a time, found that another one has been entered: ranks that leave the inner one would help in "
                "that alone; write Join([a, b])"
            )
            raise ConfigError(msg)
        if self._enable:
            _ENTERED[self._group] = ref(self)
        for joinable in self._joinables:
            joinable._join = self if self._enable else None  # noqa: SLF001 - the other half
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for joinable in self._joinables:
            joinable._join = None  # noqa: SLF001 - the other half
        if self._entered() is self:
            del _ENTERED[self._group]
        if not self._enable or kind is not None:
            return
        num_helped = 0
        while self._help():
            num_helped += 1
        for hook in self._hooks:
            hook.post_hook(is_last_joiner=not num_helped)

    def _entered(self) -> Join | None:
        found = _ENTERED.get(self._group)
        return None if found is None else found()

    def _help(self) -> bool:
        """One step of the others; False when nobody works."""
        if self.tells_by_itself:
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
        """Say that this rank still works; called by a joinable before the collectives of a step.

        Returns:
            What is under way; None outside of a context, from all but the first joinable, and where nothing is needed.
        """
        join = joinable._join  # noqa: SLF001 - the other half
        if join is None or joinable is not join._joinables[0] or join.tells_by_itself:  # noqa: SLF001
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
    if not isinstance(joinables, Sequence) or not joinables:  # type: ignore[redundant-expr]  # as above
        msg = f"expected a list of at least one joinable, found {joinables!r}"
        raise ConfigError(msg)
    for joinable in joinables:
        if not isinstance(joinable, Joinable) or not hasattr(joinable, "_join"):  # type: ignore[redundant-expr]  # as above
            kind = type(joinable).__name__
            what = f"{kind} that has not called Joinable.__init__" * isinstance(joinable, Joinable)
            msg = f"expected a Joinable, found {what or kind}: derive from Joinable, and call its __init__"
            raise ConfigError(msg)
    if len({id(joinable) for joinable in joinables}) < len(joinables):
        msg = f"expected each joinable once, found {len(joinables)} of which some are the same"
        raise ConfigError(msg)


def syncs_in_forward(module: nn.Module) -> str | None:
    """Why ranks without input cannot shadow steps of this module; None if they can."""
    for name, part in module.named_modules():
        if isinstance(part, SyncBatchNorm | nn.SyncBatchNorm) and part.training:
            return (
                f"expected a module whose forward waits for no other rank, found {type(part).__name__} {name!r}, which a rank without input cannot help "
                "with: give all ranks equally many batches, say throw_on_early_termination=True, or use BatchNorm"
            )
    return None
