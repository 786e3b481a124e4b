"""`torchgpipe.skip`: layers that stash and pop tensors for skip connections."""

from braid.parallel.pipeline.skip import (
    Namespace,
    Skippable,
    pop,
    skippable,
    stash,
    verify_skippables,
)

__all__ = ["Namespace", "Skippable", "pop", "skippable", "stash", "verify_skippables"]
