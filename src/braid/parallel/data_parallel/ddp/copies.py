"""Copies and pickles of a DistributedDataParallel: a wrapper of its own, as torch's class makes it.

Problem: averaged weights (`torch.optim.swa_utils.AveragedModel`) copy the wrapper, and old
checkpoints hold it. But it has memory, channels and hooks of its group, which cannot be copied, and
one rank alone may make a copy, so that making it must not need the others.

Idea: what is copied is the module, the arguments and whatever the program has put on the wrapper.
The rest is made anew, and the part that needs all ranks only when a backward of the copy averages
for the first time (`GradientReducer(agree=...)`). A copy that is never trained costs no channel.

                          copy.deepcopy            pickle, torch.save
    group                 the same                 the default group where it is loaded
    values, frozen        copied                   copied
    .grad                 None, as torch has it    None
    hook="..."            starts anew              starts anew
    register_comm_hook    left out, as in torch    left out
    step_in_backward      left out                 left out
    counts, residuals     start anew               start anew
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

# what is made anew; everything else on the wrapper is copied
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
    """A wrapper that is copied without the parts that belong to its group."""

    _group: Group
    _reducer: GradientReducer
    process_group: Any
    device_mesh: Any

    @abstractmethod
    def _set_up(self, group: Group, *, is_copy: bool) -> None:
        """Make the parts that belong to the group.

        Args:
            group: Ranks that train together.
            is_copy: Whether this rank may be the only one that makes them now.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a wrapper of its own over the same group. Not a collective.

        Raises:
            ConfigError: A backward of the wrapper is under way.
        """
        state = self._copied_state()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin._restore(copy.deepcopy(state, memo), self._group)  # noqa: SLF001 - of this class
        twin.process_group = self.process_group
        twin.device_mesh = self.device_mesh
        return twin

    def __copy__(self) -> Self:
        """Refuse a copy that shares the parameters, each of whose gradients two would average.

        Raises:
            ConfigError: Always.
        """
        msg = (
            "copy.copy of a DistributedDataParallel would share its parameters, and both would "
            "average their gradients: use copy.deepcopy(model), or the model itself"
        )
        raise ConfigError(msg)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled.

        Raises:
            ConfigError: A backward is under way, or the group is not the default group, which is
                the one that is joined where the wrapper is loaded.
        """
        if not _is_default(self._group):
            msg = (
                "a DistributedDataParallel is pickled over the default group of torch.distributed "
                "only, since it joins that one where it is loaded; this one's group is "
                f"{self._group!r}. Save model.state_dict() or model.module and wrap anew, or use "
                "copy.deepcopy(model)"
            )
            raise ConfigError(msg)
        return self._copied_state()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Join the default group with what was pickled. Not a collective.

        Raises:
            ConfigError: There is no default group over the backend "braid".
        """
        if not dist.is_initialized():
            msg = (
                "a pickled DistributedDataParallel joins the default group of torch.distributed "
                "where it is loaded, and there is none: call "
                "torch.distributed.init_process_group('braid') before"
            )
            raise ConfigError(msg)
        self._restore(state, group_of(None))
        self.process_group = dist.group.WORLD
        self.device_mesh = None

    def _copied_state(self) -> dict[str, Any]:
        if self._reducer.is_in_backward:
            msg = (
                "a DistributedDataParallel was copied while its backward was under way: copy it "
                "between two steps"
            )
            raise ConfigError(msg)
        return {name: value for name, value in vars(self).items() if name not in PARTS}

    def _restore(self, state: dict[str, Any], group: Group) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        Joinable.__init__(self)
        self._set_up(group, is_copy=True)


def _is_default(group: Group) -> bool:
    """Return whether what is pickled over `group` finds it again as torch's default group."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    try:
        return group_of(None) is group
    except ConfigError:  # another backend
        return False
