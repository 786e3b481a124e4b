"""The current node: the node of this process, or the node for which a call runs.

Programs have one node: `init_rpc` sets it. A function that runs for a peer belongs to the node that
received the call, which matters where threads of one process are several nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from braid.errors import StaleError
from braid.rpc.agent import ACTING, Agent

__all__ = ["acting_for", "current_agent", "has_default", "set_default"]


class _DefaultNode:
    """Holder of the node of this process.

    Attributes:
        has_joined: Whether this process has ever been a node.
    """

    def __init__(self) -> None:
        self.agent: Agent | None = None
        self.has_joined = False


_DEFAULT = _DefaultNode()


def current_agent() -> Agent:
    """Return the node for which this code runs.

    Raises:
        StaleError: `init_rpc` has not been called, or `shutdown` has.
    """
    agent = ACTING.get()
    if agent is not None:
        return agent
    if _DEFAULT.agent is None:
        msg = "RPC has not been initialized: this process is not a node, call init_rpc first"
        raise StaleError(msg)
    return _DEFAULT.agent


def set_default(agent: Agent | None) -> None:
    """Set the default node of the process; None removes it."""
    _DEFAULT.agent = agent
    _DEFAULT.has_joined |= agent is not None


def has_default() -> bool:
    """Return whether the process has a node."""
    return _DEFAULT.agent is not None


@contextlib.contextmanager
def acting_for(agent: Agent) -> Iterator[None]:
    """Run the code inside with `agent` as the current node."""
    token = ACTING.set(agent)
    try:
        yield
    finally:
        ACTING.reset(token)
