"""State of an elastic training: committed, restored after a loss, and sent to new members.

A commit is valid once all members have reached it. A member that is interrupted during a commit
does not know whether the others have reached it. So it keeps its current state as a *candidate*
until the next epoch, in which members that have completed the commit report it. Then all members
restore the same commit; see `loop`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from braid.compat.horovod.common.exceptions import HostsUpdatedInterrupt
from braid.compat.horovod.torch.elastic.handlers import StateHandler, handler_for
from braid.compat.horovod.torch.elastic.members import NEVER, ElasticMembers
from braid.compat.horovod.torch.functions import broadcast_object
from braid.errors import ConfigError

__all__ = ["ObjectState", "State", "TorchState"]


class State:
    """Base of states; subclasses define `save`, `restore`, `sync` and, if they need it, `reset`.

    Args:
        bcast_object: Function that returns the value of rank 0 on all ranks; `hvd.broadcast_object`
            when None.
        get_rank: Not needed.

    Attributes:
        num_commits: Number of commits, including commits by `sync`; -1 before the first one.
        candidate: Number of an interrupted commit that all members may have reached; -1 for none.
        base: Number of the commit with which the current epoch (period without changes) began.
        has_committed: Whether `commit` has saved the state since the last failure.
        members: Members of the run; None outside of `hvd.elastic.run`.
    """

    num_commits = NEVER
    candidate = NEVER
    base = NEVER
    has_committed = False
    members: ElasticMembers | None = None
    _callbacks: tuple[Callable[[], object], ...] = ()

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        del get_rank
        self._broadcast = bcast_object or broadcast_object

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Add functions that are called after a change of the members, before `sync`.

        They can adapt values to the number of ranks, such as the learning rate.
        """
        self._callbacks = (*self._callbacks, *callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the registered functions; `hvd.elastic.run` does so."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def commit(self) -> None:
        """Save the state once all members have called this.

        Raises:
            HostsUpdatedInterrupt: Members are about to change; on all ranks.
            HorovodInternalError: A member was lost.
        """
        changes = self.commit_as(self.num_commits + 1)
        self.has_committed = True
        if changes:
            raise HostsUpdatedInterrupt

    def check_host_updates(self) -> None:
        """Raise if members are about to change; a collective, without a commit.

        Raises:
            HostsUpdatedInterrupt: Members are about to change; raised on all ranks.
            HorovodInternalError: A member was lost.
        """
        if self.members is not None and self.members.agree_on_update():
            raise HostsUpdatedInterrupt

    def commit_as(self, number: int) -> bool:
        """Save the state as commit `number`, once all members have called this.

        Returns:
            Whether members are about to change.
        """
        self.candidate = number
        changes = self.members is not None and self.members.agree_on_update()
        self.save()
        self.num_commits, self.candidate = number, NEVER
        return changes

    def save(self) -> None:
        """Copy the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the state of the last `save`."""
        raise NotImplementedError

    def sync(self) -> None:
        """Replace the state by the state of rank 0; a collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the state to new members; called before the registered functions."""


class ObjectState(State):
    """State with values as attributes.

    Args:
        bcast_object, get_rank: See `State`.
        values: Values by name: numbers, text, lists, dictionaries; see `broadcast_object`.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **values: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved = copy.deepcopy(values)
        self._set(values)

    def save(self) -> None:
        """Copy the values in memory, for `restore`."""
        self._saved = copy.deepcopy(self._values())

    def restore(self) -> None:
        """Restore the values of the last `save`."""
        self._set(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Replace the values by rank 0's, and commit them; a collective."""
        self._transfer()
        self.commit_as(max(self.base, self.num_commits) + 1)

    def _transfer(self) -> None:
        if self._saved:
            self._set(self._broadcast(self._values()))

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if hasattr(type(self), name):
                msg = (
                    f"{name!r} is already an attribute of the state class: pass the value under "
                    "another name"
                )
                raise ConfigError(msg)
            setattr(self, name, value)


class TorchState(ObjectState):
    """State of a model, its optimizer and further values.

    Models, optimizers, `ElasticSampler`s and objects with `state_dict` and `load_state_dict`, such
    as schedulers, are updated in place; other values are replaced as in `ObjectState`.

    Args:
        model: Model; pass further models by other names.
        optimizer: Optimizer of the model.
        values: Further objects and values by name.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **values: Any
    ) -> None:
        handlers: dict[str, StateHandler[Any]] = {}
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **values}.items():
            handler = handler_for(value)
            if handler is None:
                plain[name] = value
            else:
                handlers[name] = handler
        super().__init__(**plain)
        self._handlers = handlers
        for name, handler in handlers.items():
            setattr(self, name, handler.value)

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None and handler.value is not value:
            handler.set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copy the state of all objects in memory, for `restore`."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore the state of all objects from the last `save`."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def _transfer(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super()._transfer()
