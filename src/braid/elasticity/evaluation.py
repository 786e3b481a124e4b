"""An evaluation between the steps of an elastic training, in which ranks may communicate.

A rank that is lost breaks it for some members, while others may have finished it. So they compare,
when they go on, who has, and all do it again if one has not.
"""

from __future__ import annotations

from collections.abc import Callable

from braid.errors import ConfigError

__all__ = ["Evaluation"]


class Evaluation:
    """A function that all members call every few steps.

    Args:
        function: The function; None to call nothing.
        every: Number of steps between two calls.

    Raises:
        ConfigError: Only one of `function` and `every` is given.
    """

    def __init__(self, function: Callable[[], object] | None = None, every: int = 0) -> None:
        if (function is None) != (every <= 0):
            msg = (
                f"evaluate={function!r} and evaluate_every={every} belong together: pass both, a "
                "function and a number of steps of at least 1"
            )
            raise ConfigError(msg)
        self._function = function
        self._every = every
        self._last = 0  # number of steps after which it was called last

    def is_due(self, num_steps: int) -> bool:
        """Return whether the function is to be called after `num_steps` steps."""
        return bool(self._every) and num_steps % self._every == 0 and num_steps != self._last

    def run(self, num_steps: int) -> None:
        """Call the function after `num_steps` steps; a collective."""
        assert self._function is not None
        self._function()
        self._last = num_steps

    def skip(self, num_steps: int) -> None:
        """Record that the evaluation after `num_steps` steps is complete, without a call."""
        self._last = num_steps
