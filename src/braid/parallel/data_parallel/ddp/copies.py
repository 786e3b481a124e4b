"""Copies and pickles of a DistributedDataParallel: new wrappers, as with torch's class.

Problem: averaged weights (`torch.optim.swa_utils.AveragedModel`) copy the wrapper, and old
checkpoints contain it. But its memory, channels and hooks belong to the group and cannot be copied,
and a single rank may make a copy, so copying must not communicate.

Idea: copy the module, the arguments and any attributes that the program has set on the wrapper.
Everything else is created again. The part that needs all ranks is created when a backward of the
copy averages for the first time (`GradientReducer(agree=...)`), so a copy that is never trained
uses no channel.

                          copy.deepcopy            pickle, torch.save
    group                 the same                 the default group of the loading process
    values, frozen        copied                   copied
    .grad                 None, as in torch        None
    hook="..."            restarts                 restarts
    register_comm_hook    left out, as in torch    left out
    step_in_backward      left out                 left out
    counts, residuals     restart                  restart
    set_loss_weight       left out                 left out
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

from torch import distributed as dist
from torch import nn
from typing_extensions import Self

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.data_parallel.ddp.join import Joinable
from braid.parallel.gradients import GradientReducer
from braid.parallel.gradients.process_groups import group_of

__all__ = ["CopyableWrapper"]

# attributes that are created again; all others are copied
PARTS = frozenset(
    {
        "_comm_hook",
        "_group",
        "_has_buffers",
        "_join",
        "_listener",
        "_precision",
        "_reducer",
        "_replicas",
        "_snapshot",
        "_table",
        "device_mesh",
        "process_group",
    }
)


class CopyableWrapper(nn.Module, Joinable):
    """Base class of wrappers that are copied and pickled without their process group."""

    _group: Group
    _reducer: GradientReducer
    process_group: Any
    device_mesh: Any

    @abstractmethod
    def _set_up(self, group: Group, *, is_copy: bool) -> None:
        """Create the parts that belong to the group.

        Args:
            group: Ranks that train together.
            is_copy: Whether this rank may be the only one that creates them now.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a new wrapper over the same group; not a collective.

        Raises:
            ConfigError: A backward of the wrapper is running.
        """
        state = self._copied_state()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._restore(copy.deepcopy(state, memo), self._group)  # noqa: SLF001 - of this class
        twin.process_group = self.process_group
        twin.device_mesh = self.device_mesh
        return twin

    def __copy__(self) -> Self:
        """Raise, because a shallow copy would average the gradients of shared parameters twice.

        Raises:
            ConfigError: Always.
        """
        msg = (
            "copy.copy of a DistributedDataParallel would share its parameters, and both would "
            "average gradients: use copy.deepcopy(model), or the model itself"
        )
        raise ConfigError(msg)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle.

        Raises:
            ConfigError: A backward is running, or the group is not the default group, which a
                loaded wrapper joins.
        """
        if not _is_default(self._group):
            msg = (
                "only a DistributedDataParallel over the default group of torch.distributed can "
                f"be pickled, which it joins when loaded, but this one uses {self._group!r}. "
                "Save model.state_dict() or model.module and wrap again, or use "
                "copy.deepcopy(model)"
            )
            raise ConfigError(msg)
        return self._copied_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the pickled state over the default group; not a collective.

        Raises:
            ConfigError: The default group does not exist, or has another backend than "braid".
        """
        if not dist.is_initialized():
            msg = (
                "a pickled DistributedDataParallel joins the default group of torch.distributed "
                "when it is loaded, and this process has none: call "
                "torch.distributed.init_process_group('braid') first"
            )
            raise ConfigError(msg)
        self._restore(state, group_of(None))
        self.process_group = dist.group.WORLD
        self.device_mesh = None

    def _copied_state(self) -> dict[str, Any]:
        if self._reducer.is_in_backward:
            msg = (
                "a DistributedDataParallel was copied during its backward: copy it "
                "between two steps"
            )
            raise ConfigError(msg)
        return {name: value for name, value in vars(self).items() if name not in PARTS}

    def _restore(self, state: dict[str, Any], group: Group) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        self._set_up(group, is_copy=True)


def _is_default(group: Group) -> bool:
    """Return whether `group` is the default group, so that loading a pickle finds it again."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    try:
        return group_of(None) is group
    except ConfigError:  # another backend
        return False
