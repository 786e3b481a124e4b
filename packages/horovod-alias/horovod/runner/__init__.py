"""`from horovod.runner import run`, as some scripts have it."""

from braid.compat.horovod import run

__all__ = ["run"]
