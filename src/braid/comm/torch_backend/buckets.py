"""Gradient buckets of stock DDP, moved to memory that all ranks see.

Problem: DDP allocates its buckets itself, so each all-reduce copies them into shared memory and
back. They cannot be replaced: gradients may be views of them.

Idea: torch can move a storage into shared memory in place, and all tensors that view it follow
(`Group.adopt`). A bucket is recognised by its use: it is a whole storage of 64 KiB or more that is
reduced inside backward for the second time. When DDP rebuilds its buckets, the new ones are
recognised in the same way. Each rank decides for itself; the all-reduce detects whether all ranks'
tensors lie in shared memory.

Bare pointers into a storage, such as a NumPy array made of a gradient, do not follow it. Only
buckets are moved, and once, at the second step.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict

import torch

from braid.comm import Group
from braid.errors import CommError

__all__ = ["BucketStorages"]

BUCKET_BYTES = 64 << 10  # from here copies cost more than the rest of an all-reduce
NUM_REMEMBERED = 1024  # storages that have been reduced once; the oldest are forgotten


class BucketStorages:
    """Storages that are reduced again and again.

    Args:
        group: Group to whose memory they move.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._seen: OrderedDict[tuple[int, int], None] = OrderedDict()
        # nobody to share with, or nothing that could be shared
        self._off = group.size == 1 or not group.engine.capabilities.adopts

    def note(self, x: torch.Tensor) -> None:
        """Note a tensor to be reduced inside backward, and move it the second time."""
        nbytes = x.numel() * x.element_size()
        if self._off or nbytes < BUCKET_BYTES:
            return
        storage = x.untyped_storage()
        if storage.nbytes() != nbytes or not x.is_contiguous() or storage.is_shared():
            return
        key = (storage.data_ptr(), nbytes)
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > NUM_REMEMBERED:
                self._seen.popitem(last=False)
            return
        del self._seen[key]
        try:
            self._group.adopt(x)
        except CommError as exc:  # no room in /dev/shm: stay with copies, which always work
            self._off = True
            msg = (
                "DDP's gradients are copied into shared memory at each step instead of lying "
                f"there: {exc}"
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=2)
