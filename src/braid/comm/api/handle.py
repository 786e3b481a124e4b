"""Base of handles on resources of a process, which cannot be copied or pickled.

A group refers to sockets, memory and threads of its process. A deep copy of a model that refers to
it refers to the same group; a pickled group would be loaded by a process that is not a member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from braid.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

__all__ = ["Handle"]


class Handle:
    """Base class of objects that copy.copy returns unchanged and that cannot be pickled."""

    def __deepcopy__(self, memo: object) -> Self:
        """Return the handle itself: a process has only one."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raise: another process is not a member.

        Raises:
            ConfigError: Always.
        """
        msg = (
            f"a {type(self).__name__.lower()} cannot be pickled, nor an object that refers to it: "
            "save tensors, such as a module's state_dict()"
        )
        raise ConfigError(msg)
