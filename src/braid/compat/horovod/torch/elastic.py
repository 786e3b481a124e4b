"""Elastic training: its names, so that scripts can be imported; it is not there yet.

Raises:
    ConfigError: When something of it is used.
"""

from __future__ import annotations

from typing import Any, NoReturn

from braid.errors import ConfigError

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

MISSING = (
    "expected a job whose ranks stay, found elastic training, which is not there yet: run with a "
    "fixed number of ranks, save checkpoints "
    "(braid.save), and start again from the last one"
)


def run(func: Any) -> NoReturn:
    """Not there yet."""
    del func
    raise ConfigError(MISSING)


class State:
    """Not there yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise ConfigError(MISSING)


class ObjectState(State):
    """Not there yet."""


class TorchState(ObjectState):
    """Not there yet."""


class ElasticSampler(State):
    """Not there yet."""
