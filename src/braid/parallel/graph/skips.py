"""Skip connections: values that go from one part of a model directly to a later, non-adjacent part.

A part stashes a value under a key, and the later part pops it from the same dictionary. The code
that runs the parts provides the dictionary (`use_skips`), and transfers its values to the part that
pops them. Parts declare their keys: `stashable()` and `poppable()`.

Source: C. Kim et al., torchgpipe (2020), section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol, runtime_checkable
from uuid import uuid4

import torch
from torch import nn

__all__ = [
    "Namespace",
    "SkipKey",
    "Skipping",
    "Skips",
    "current_skips",
    "skips_of",
    "thread_skips",
    "use_skips",
]


class Namespace:
    """Namespace that distinguishes equal names of skip connections; a copy equals its original."""

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid4()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)


class SkipKey(NamedTuple):
    """Name of a skip connection in its namespace; None is the common namespace."""

    namespace: Namespace | None
    name: str


Skips = dict[SkipKey, "torch.Tensor | None"]
# stashed tensors: each pipeline's stage sets its own
_SKIPS: ContextVar[Skips | None] = ContextVar("braid_skips", default=None)
# stashed tensors of layers that this thread calls without a pipeline
_PLAIN: ContextVar[Skips | None] = ContextVar("braid_plain_skips", default=None)


@contextmanager
def use_skips(skips: Skips) -> Iterator[None]:
    """Return a context in which layers put stashed tensors into the dictionary `skips`."""
    token = _SKIPS.set(skips)
    try:
        yield
    finally:
        _SKIPS.reset(token)


def current_skips() -> Skips | None:
    """Return the dictionary of stashed tensors set by `use_skips`; None outside of its context."""
    return _SKIPS.get()


def thread_skips() -> Skips:
    """Return the dictionary of stashed tensors set by `use_skips`; a thread-local one otherwise."""
    skips = _SKIPS.get() if _SKIPS.get() is not None else _PLAIN.get()
    if skips is None:
        skips = {}
        _PLAIN.set(skips)
    return skips


@runtime_checkable
class Skipping(Protocol):
    """Module that stashes values for later layers, or pops values of earlier layers."""

    def stashable(self) -> Iterable[SkipKey]:
        """Return the keys that the module stashes."""

    def poppable(self) -> Iterable[SkipKey]:
        """Return the keys that the module pops."""


def skips_of(module: nn.Module) -> tuple[list[SkipKey], list[SkipKey]]:
    """Return the keys that a layer and its children stash, and the keys that they pop."""
    stashes: list[SkipKey] = []
    pops: list[SkipKey] = []
    for part in module.modules():
        if isinstance(part, Skipping):
            stashes += part.stashable()
            pops += part.poppable()
    return stashes, pops
