"""Gradient buckets of stock DDP, moved to memory that all ranks share.

Problem: DDP allocates its buckets, so each all-reduce copies them into shared memory and back. They
cannot be replaced: gradients may be views of them.

Idea: torch can move a storage into shared memory in place, with all tensors that view it
(`Group.adopt`). A bucket is recognised by its use: it is a whole storage of 64 KiB or more that is
reduced inside backward for the second time. When DDP rebuilds its buckets, the new ones are
recognised in the same way. Each rank decides alone; the all-reduce detects whether all ranks'
tensors are in shared memory.

Raw pointers into a storage, such as a NumPy array over a gradient, keep the old memory. Only
buckets are moved, once, at the second step.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict

import torch

from braid.comm import Group
from braid.errors import CommError

__all__ = ["BucketStorages"]

BUCKET_BYTES = 64 << 10  # from this size on, copies cost more than the rest of an all-reduce
NUM_REMEMBERED = 1024  # storages that have been reduced once; the oldest are forgotten


class BucketStorages:
    """Recogniser of storages that are reduced repeatedly, which moves them to shared memory.

    Args:
        group: Group that moves the storages.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._seen: OrderedDict[tuple[int, int], None] = OrderedDict()
        # no rank to share with, or no shared memory
        self._off = group.size == 1 or not group.engine.capabilities.adopts

    def note(self, x: torch.Tensor) -> None:
        """Count a tensor's reductions inside backward; at the second, move it to shared memory."""
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
        except CommError as exc:  # /dev/shm is full: keep copying, which always works
            self._off = True
            msg = (
                "DDP's gradients are copied into shared memory at each step instead of being moved "
                f"there: {exc}"
            )
            warnings.warn(msg, RuntimeWarning, stacklevel=2)
