"""Base of objects that are closed at the end of a `with` block.

Why not `contextlib.AbstractContextManager`: each class would still define `__exit__`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

__all__ = ["Closing"]


class Closing:
    """Context manager that calls `close` at its end; subclasses define `close`."""

    __slots__ = ()

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
