"""Horovod's API: `import braid.compat.horovod.torch as hvd`, and `run`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braid.compat.horovod.launcher.run_function import run

__all__ = ["run"]


def __getattr__(name: str) -> Any:
    if name == "run":  # loaded when used: a rank does not need the launcher
        return import_module("braid.compat.horovod.launcher.run_function").run
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
