"""A handle on something that several processes share, which no copy can stand for.

A group refers to sockets, memory and threads of its process. A deep copy of a model that refers to
it refers to the same group; a pickled one would reach a process that is no member.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from braid.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

__all__ = ["Handle"]


class Handle:
    """Is its own copy, and cannot be pickled."""

    def __deepcopy__(self, memo: object) -> Self:
        """Return the handle itself, of which there is one."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse: other processes are not members.

        Raises:
            ConfigError: Always.
        """
        msg = (
            f"a {type(self).__name__.lower()} cannot be pickled, nor what refers to it: save "
            "tensors, such as a module's state_dict()"
        )
        raise ConfigError(msg)
