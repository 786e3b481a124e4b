"""Device scopes of a model while it is captured: `with braid.device(...)`.

The graph records the devices of the scopes; the code that places the graph merges them. A scope
inside of a module that is captured as one call would be lost, so it raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from braid.errors import ConfigError

__all__ = ["current_devices", "device_scope", "whole_call"]

_DEVICES: ContextVar[tuple[str, ...]] = ContextVar("braid-graph-devices", default=())
_WHOLE: ContextVar[str | None] = ContextVar("braid-graph-whole-call", default=None)


def current_devices() -> tuple[str, ...]:
    """Return the devices of the `device_scope` contexts around this code, the outermost first."""
    return _DEVICES.get()


@contextmanager
def device_scope(device: str | None) -> Iterator[None]:
    """Return a context in which `device` is recorded for calls; None hides outer contexts.

    Raises:
        ConfigError: The code belongs to a module that is captured as one call.
    """
    module = _WHOLE.get()
    if module is not None:
        msg = (
            f"device({device!r}) is entered inside of {module}, which is captured as one call "
            f"and stays on one device: enter it around the call of {module}, or move the "
            "operations out of the module"
        )
        raise ConfigError(msg)
    token = _DEVICES.set(() if device is None else (*_DEVICES.get(), device))
    try:
        yield
    finally:
        _DEVICES.reset(token)


@contextmanager
def whole_call(module: str) -> Iterator[None]:
    """Return a context for code that a graph contains as one call of a module."""
    token = _WHOLE.set(module or "the model")
    try:
        yield
    finally:
        _WHOLE.reset(token)
