"""Elastic training: names only, so that scripts can be imported; it is not there yet.

Raises:
    ConfigError: One of the names is used.
"""

from __future__ import annotations

from typing import Any, NoReturn

from braid.errors import ConfigError

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]

MISSING = (
    "elastic training is not there yet: run with a fixed number of ranks, save checkpoints "
    "(braid.save), and start again from the last one"
)


def run(func: Any) -> NoReturn:
    """Refuse, as elastic training is not there yet."""
    del func
    raise ConfigError(MISSING)


class State:
    """State of elastic training, which is not there yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        raise ConfigError(MISSING)


class ObjectState(State):
    """State of elastic training, which is not there yet."""


class TorchState(ObjectState):
    """State of elastic training, which is not there yet."""


class ElasticSampler(State):
    """Sampler of elastic training, which is not there yet."""
