"""Process group over a group of braid, which all parts of torch.distributed call."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from braid.comm.engines.work import Works
from braid.comm.torch_backend.base import c10d
from braid.comm.torch_backend.blocking import is_blocking
from braid.comm.torch_backend.collectives import Collectives
from braid.comm.torch_backend.foreign import Foreign
from braid.comm.torch_backend.shapes import in_shared_memory, tensors_of
from braid.comm.torch_backend.shared_world import GroupRendezvous, SharedWorlds
from braid.comm.torch_backend.work import FinishedWork, PendingWork, seconds
from braid.errors import ConfigError
from braid.runtime.torch_internals import backend_options, end_coalescing, start_coalescing

__all__ = ["BraidProcessGroup"]

SLOTS_BYTES = 512 << 10  # fits into the slots of a channel, so that send need not wait


class BraidProcessGroup(Collectives):
    """Collectives, messages, batches and subgroups; torch's docstrings apply."""

    @classmethod
    def open(cls, options: Any, shared_worlds: SharedWorlds) -> BraidProcessGroup:
        """Return a new group; a collective call of its members.

        Args:
            options: torch's `_DistributedBackendOptions`.
            shared_worlds: Registry of the shared memory of this process.
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
        if self._coalesced is None and is_blocking():
            self._group.send(_flat(x), dst, tag=tag, timeout_s=self._timeout_s)
            return self._done
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
        if self._coalesced is None and is_blocking():
            self._group.recv(_flat(x), src, tag=tag, timeout_s=self._timeout_s)
            return self._done
        work = self._now.recv(_flat(x), src, tag=tag, timeout_s=self._timeout_s)
        return self._passing(work, [x], lambda: src, waited_soon=self._is_waited_for_soon())

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Start receiving from the rank that sends first."""
        (x,) = tensors_of(tensors)
        if not in_shared_memory(x):
            return self._elsewhere(x).recv_anysource([x], tag)
        work = self._group.recv(_flat(x), None, tag=tag, async_op=True, timeout_s=self._timeout_s)
        return self._started(work, [x], lambda: work.source)

    # Coalescing.

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

    # Subgroups.

    supports_splitting = True  # torch checks this before it calls `split_group`
    options = None  # options that a new group would inherit

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside the new groups need not take part."""

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,  # noqa: ARG002 - torch's signature; unused
        group_name: str | None = None,
        group_desc: str | None = None,
        # a device's backend is made at its first use
        device_types: Any = None,  # noqa: ARG002
    ) -> BraidProcessGroup | None:
        """Return a new group of the members `ranks` of this group; a collective call of them.

        Other ranks need not call this; they get None. The new group ends with this one at the
        latest.

        Raises:
            ConfigError: Some ranks are not members.
            StaleError: This group has ended.
            CommTimeout: Some ranks did not call this in time; the message names them.
        """
        order, size = sorted(set(ranks)), self._group.size
        if not order or len(order) != len(ranks) or not 0 <= order[0] <= order[-1] < size:
            msg = (
                f"ranks of a new group must be different and from 0 to {size - 1}, got "
                f"{list(ranks)}: list each rank once"
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
    """Return `x` as one dim if it is contiguous: messages of torch have no shape."""
    return x if x.dim() == 1 or not x.is_contiguous() else x.view(-1)
