"""The error of calls that cannot be made, which programs of torch catch as a RuntimeError."""

from __future__ import annotations

from braid.errors import ConfigError

__all__ = ["RpcError"]


class RpcError(ConfigError, RuntimeError):
    """A call, a reference or a context cannot be used in this way.

    A ConfigError of braid. It is also a RuntimeError, which torch raises in these cases.
    """
