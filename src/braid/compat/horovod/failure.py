"""What Horovod's functions raise when an operation fails."""

from __future__ import annotations

__all__ = ["HorovodInternalError"]


class HorovodInternalError(RuntimeError):
    """An operation was refused on all ranks, or could not be carried out."""
