"""Skip connections: a layer stashes a tensor, and a later one, perhaps of another stage, pops it.

    @skippable(stash=["early"])                         @skippable(pop=["early"])
    class Enters(nn.Module):                            class Leaves(nn.Module):
        def forward(self, x):                               def forward(self, x):
            yield stash("early", x)                             early = yield pop("early")
            return self.conv(x)                                 return x + early

The tensor goes straight from the stage of one to the stage of the other, and its gradient straight
back; stages between them never see it. Layers of one model that use a name several times are told
apart by namespaces (`isolate`). Without a pipeline the layers work as they are.

Source: C. Kim et al., torchgpipe (2020), section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.errors import BraidError, ConfigError
from braid.parallel.graph.skips import Namespace, SkipKey, Skips, skips_of, thread_skips, use_skips

__all__ = [
    "Namespace",
    "SkipError",
    "SkipKey",
    "Skippable",
    "pop",
    "skippable",
    "skips_of",
    "stash",
    "use_skips",
    "verify_skippables",
]


class SkipError(BraidError, RuntimeError):
    """A layer stashed or popped something else than it has declared."""


class stash(NamedTuple):  # noqa: N801 - a command that layers yield, written as a call
    """Command of a layer: keep a tensor under a name."""

    name: str
    tensor: torch.Tensor | None


class pop(NamedTuple):  # noqa: N801
    """Command of a layer: give me the tensor of a name; `yield` returns it."""

    name: str


class Skippable(nn.Module):
    """A module whose forward may yield `stash` and `pop`; made by the decorator `skippable`.

    Args:
        module: The module; its forward is a generator.
        stash: Names that it stashes.
        pop: Names that it pops.
    """

    def __init__(self, module: nn.Module, stash: Iterable[str], pop: Iterable[str]) -> None:
        super().__init__()
        self.module = module
        self._stash = tuple(stash)
        self._pop = tuple(pop)
        self._namespaces: dict[str, Namespace] = {}

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Put names into a namespace, in place.

        Args:
            ns: The namespace.
            only: Names to put there; all names when None.
        """
        names = set(self._stash) | set(self._pop)
        chosen = names if only is None else set(only)
        if not chosen <= names:
            unknown = ", ".join(sorted(chosen - names))
            msg = f"{unknown} cannot be isolated: the layer stashes or pops {sorted(names)}"
            raise ConfigError(msg)
        self._namespaces.update(dict.fromkeys(chosen, ns))
        return self

    def stashable(self) -> Iterator[SkipKey]:
        """Yield what the layer stashes."""
        return map(self._key, self._stash)

    def poppable(self) -> Iterator[SkipKey]:
        """Yield what the layer pops."""
        return map(self._key, self._pop)

    def _key(self, name: str) -> SkipKey:
        return SkipKey(self._namespaces.get(name), name)

    def forward(self, value: Any) -> Any:
        """Run the module, and do what it yields.

        Raises:
            SkipError: The module stashes or pops something else than it has declared, or pops what
                nobody has stashed.
        """
        result = self.module(value)
        if not isinstance(result, Generator):
            self._check_done(set(), set())
            return result
        skips = thread_skips()
        stashed: set[str] = set()
        popped: set[str] = set()
        answer: Any = None
        while True:
            try:
                command = result.send(answer)
            except StopIteration as end:
                self._check_done(stashed, popped)
                return end.value
            answer = self._execute(command, skips, stashed, popped)

    def _execute(self, command: Any, skips: Skips, stashed: set[str], popped: set[str]) -> Any:
        kind = type(self.module).__name__
        if isinstance(command, stash):
            if command.name not in self._stash:
                msg = f"{kind} stashes {command.name!r}, which it has not declared as stashable"
                raise SkipError(msg)
            skips[self._key(command.name)] = command.tensor
            stashed.add(command.name)
            return None
        if isinstance(command, pop):
            if command.name not in self._pop:
                msg = f"{kind} pops {command.name!r}, which it has not declared as poppable"
                raise SkipError(msg)
            key = self._key(command.name)
            if key not in skips:
                msg = f"{kind} pops {command.name!r}, which no layer before it has stashed"
                raise SkipError(msg)
            popped.add(command.name)
            return skips[key]
        msg = f"{kind} yields {command!r}: yield stash(name, tensor) or pop(name) only"
        raise SkipError(msg)

    def _check_done(self, stashed: set[str], popped: set[str]) -> None:
        left = [f"{name!r} has not been stashed" for name in self._stash if name not in stashed]
        left += [f"{name!r} has not been popped" for name in self._pop if name not in popped]
        if left:
            msg = f"{type(self.module).__name__} has declared more than it did: {'; '.join(left)}"
            raise SkipError(msg)

    def extra_repr(self) -> str:
        """Return what `repr` shows: the names."""
        parts = [f"stash={self._stash}"] * bool(self._stash) + [f"pop={self._pop}"] * bool(
            self._pop
        )
        return ", ".join(parts)


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], Callable[..., Skippable]]:
    """Decorate a module class whose forward yields `stash` and `pop`.

    Args:
        stash: Names that it stashes.
        pop: Names that it pops.

    Returns:
        Decorator; the decorated name makes a `Skippable` around an instance of the class.
    """
    stashed, popped = tuple(stash), tuple(pop)

    def decorate(cls: type[nn.Module]) -> Callable[..., Skippable]:
        def make(*args: Any, **kwargs: Any) -> Skippable:
            return Skippable(cls(*args, **kwargs), stashed, popped)

        make.__name__, make.__doc__, make.__module__ = cls.__name__, cls.__doc__, cls.__module__
        make.__qualname__ = cls.__qualname__
        make.wrapped = cls  # type: ignore[attr-defined]
        cls.__qualname__ += ".wrapped"  # the place at which pickle finds the class
        return make

    return decorate


def verify_skippables(layers: Iterable[nn.Module]) -> None:
    """Check that each name is stashed once, and popped once by a later layer.

    Args:
        layers: Layers of a model, in order, or an `nn.Sequential`.

    Raises:
        TypeError: Names do not match; the message lists all problems.
    """
    problems: list[str] = []
    stashed: set[SkipKey] = set()
    popped: set[SkipKey] = set()
    for number, layer in enumerate(layers):
        stashes, pops = skips_of(layer)
        for key in pops:
            if key in popped:
                problems.append(f"{key.name!r} is popped once more by layer {number}")
            elif key not in stashed | set(stashes):
                problems.append(f"{key.name!r} is popped by layer {number}, but not stashed before")
            popped.add(key)
        for key in stashes:
            if key in stashed:
                problems.append(f"{key.name!r} is stashed once more by layer {number}")
            stashed.add(key)
    never = stashed - popped
    problems += [f"{key.name!r} is stashed, but never popped" for key in stashed if key in never]
    if problems:
        msg = f"pairs of stash and pop do not match: {'; '.join(problems)}"
        raise TypeError(msg)
