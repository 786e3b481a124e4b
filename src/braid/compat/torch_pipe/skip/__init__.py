"""`torch.distributed.pipeline.sync.skip`: layers that stash and pop tensors."""

from braid.parallel.pipeline.skip import (
    Namespace,
    Skippable,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
