"""The process group over a group of braid that every part of torch.distributed calls."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from braid.comm.engines.work import Works
from braid.comm.torch_backend.base import c10d
from braid.comm.torch_backend.collectives import Collectives
from braid.comm.torch_backend.foreign import Foreign
from braid.comm.torch_backend.shapes import in_shared_memory, tensors_of
from braid.comm.torch_backend.shared_world import GroupRendezvous, SharedWorlds
from braid.comm.torch_backend.work import FinishedWork, PendingWork, seconds
from braid.errors import ConfigError
from braid.runtime.torch_internals import backend_options, end_coalescing, start_coalescing

__all__ = ["BraidProcessGroup"]

SLOTS_BYTES = (
    512 << 10
)  # fits into the slots of a channel, so it is on its way as soon as it is sent


class BraidProcessGroup(Collectives):
    """Collectives, messages, batches and groups of some members; torch's docstrings apply."""

    @classmethod
    def open(cls, options: Any, shared_worlds: SharedWorlds) -> BraidProcessGroup:
        """Make a group; collective among its members.

        Args:
            options: torch's `_DistributedBackendOptions`.
            shared_worlds: Shared memory in which this process is a rank.
        """
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        # braid needs a deadline; torch's unset one means its own default
        timeout_s = seconds(options.timeout) or c10d.default_pg_timeout.total_seconds()
        meeting = GroupRendezvous(options.store, ranks, options.group_rank, timeout_s)
        shared_world, group = shared_worlds.open(meeting)
        return cls(shared_world, group, Foreign(options, ranks), options.store, shared_worlds)

    # Messages.

    def send(self, tensors: Any, dst: int, tag: int = 0) -> Any:
        """Start sending a tensor."""
        (x,) = tensors_of(tensors)
        if not in_shared_memory(x):
            return self._elsewhere(x).send([x], dst, tag)
        if self._shared_world.spare_cores and x.numel() * x.element_size() > SLOTS_BYTES:
            work = self._group.send(
                _flat(x), dst, tag=tag, async_op=True, timeout_s=self._timeout_s
            )
            return self._started(work, [x], lambda: dst)
        work = self._now.send(_flat(x), dst, tag=tag, timeout_s=self._timeout_s)
        return self._passing(work, [x], lambda: dst, waited_soon=self._is_waited_for_soon())

    def recv(self, tensors: Any, src: int, tag: int = 0) -> Any:
        """Start receiving a tensor."""
        (x,) = tensors_of(tensors)
        if not in_shared_memory(x):
            return self._elsewhere(x).recv([x], src, tag)
        work = self._now.recv(_flat(x), src, tag=tag, timeout_s=self._timeout_s)
        return self._passing(work, [x], lambda: src, waited_soon=self._is_waited_for_soon())

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Start receiving from the rank that sends first."""
        (x,) = tensors_of(tensors)
        if not in_shared_memory(x):
            return self._elsewhere(x).recv_anysource([x], tag)
        work = self._group.recv(_flat(x), None, tag=tag, async_op=True, timeout_s=self._timeout_s)
        return self._started(work, [x], lambda: work.source)

    # Several at once.

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._coalesced = []
        else:
            start_coalescing(self._foreign.group(device), device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return end_coalescing(self._foreign.group(device), device)
        parts, self._coalesced = self._coalesced, None
        if not parts:
            return FinishedWork([])
        return PendingWork(Works(parts, []), [], self)

    # Groups of some members.

    supports_splitting = True  # torch looks for it before it calls `split_group`
    options = None  # that a new group would inherit

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks that are in no new group need not take part."""

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,  # noqa: ARG002 - torch's signature; nothing to be set
        group_name: str | None = None,
        group_desc: str | None = None,
        # a device's backend is made when it is needed
        device_types: Any = None,  # noqa: ARG002
    ) -> BraidProcessGroup | None:
        """Make a group of the members `ranks`, counted here; collective among them.

        Other ranks need not call this and get None. The new group ends with this one at the latest.

        Raises:
            ConfigError: Some ranks are no members.
            StaleError: This group has ended.
            CommTimeout: Some ranks did not come; they are named.
        """
        order, size = sorted(set(ranks)), self._group.size
        if not order or len(order) != len(ranks) or not 0 <= order[0] <= order[-1] < size:
            msg = (
                f"ranks of a new group must be different ones out of 0..{size - 1}, got "
                f"{list(ranks)}"
            )
            raise ConfigError(msg)
        if self.rank() not in order:
            return None
        name = group_name or f"{self._name}:split:{'_'.join(map(str, order))}"
        made = backend_options()
        made.store = c10d.PrefixStore(f"{name}/", self._store)
        made.group_rank, made.group_size = order.index(self.rank()), len(order)
        made.timeout, made.group_id = timeout or self._foreign.timeout, name
        made.global_ranks_in_group = [self._foreign.ranks[rank] for rank in order]
        group = self.open(made, self._shared_worlds)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or f"{self._desc}:split")
        self._splits = [*(split for split in self._splits if not split.ended), group]
        return group


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of `x` as one dim: messages of torch have a length, and no shape."""
    return x.view(-1) if x.is_contiguous() else x
