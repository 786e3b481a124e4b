"""Skip connections: a layer stashes a tensor, and a later layer, in any stage, pops it.

    @skippable(stash=["early"])                         @skippable(pop=["early"])
    class Enters(nn.Module):                            class Leaves(nn.Module):
        def forward(self, x):                               def forward(self, x):
            yield stash("early", x)                             early = yield pop("early")
            return self.conv(x)                                 return x + early

The tensor is sent directly from one stage to the other, and its gradient directly back; the stages
between them are not involved. If layers of one model use a name several times, namespaces
distinguish them (`isolate`). The layers also work without a pipeline.

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
    """A layer's stashes or pops differ from its declaration."""


class stash(NamedTuple):  # noqa: N801 - a command that layers yield, written as a call
    """Command that a layer's forward yields to keep a tensor, under a name, for a later layer."""

    name: str
    tensor: torch.Tensor | None


class pop(NamedTuple):  # noqa: N801
    """Command that a layer's forward yields to get a tensor that an earlier layer has stashed."""

    name: str


class Skippable(nn.Module):
    """Module with a forward that may yield `stash` and `pop`; created by `skippable`.

    Args:
        module: The module; its forward is a generator.
        stash: Names that the module stashes.
        pop: Names that the module pops.
    """

    def __init__(self, module: nn.Module, stash: Iterable[str], pop: Iterable[str]) -> None:
        super().__init__()
        self.module = module
        self._stash = tuple(stash)
        self._pop = tuple(pop)
        self._namespaces: dict[str, Namespace] = {}

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Put the names of this module's skip connections into a namespace, in place.

        Args:
            ns: The namespace.
            only: Names to put into the namespace; None for all names.
        """
        names = set(self._stash) | set(self._pop)
        chosen = names if only is None else set(only)
        if not chosen <= names:
            unknown = ", ".join(sorted(chosen - names))
            msg = (
                f"isolate() got unknown names {unknown}: the layer stashes or pops only "
                f"{sorted(names)}"
            )
            raise ConfigError(msg)
        self._namespaces.update(dict.fromkeys(chosen, ns))
        return self

    def stashable(self) -> Iterator[SkipKey]:
        """Yield the keys that the layer stashes."""
        return map(self._key, self._stash)

    def poppable(self) -> Iterator[SkipKey]:
        """Yield the keys that the layer pops."""
        return map(self._key, self._pop)

    def _key(self, name: str) -> SkipKey:
        return SkipKey(self._namespaces.get(name), name)

    def forward(self, value: Any) -> Any:
        """Run the module, and execute the commands that it yields.

        Raises:
            SkipError: Stashes or pops differ from the declaration, or a popped tensor was not
                stashed.
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
                msg = (
                    f"{kind} stashes a name, but {command.name!r} has not been declared as "
                    "stashable: list it in stash= of @skippable"
                )
                raise SkipError(msg)
            skips[self._key(command.name)] = command.tensor
            stashed.add(command.name)
            return None
        if isinstance(command, pop):
            if command.name not in self._pop:
                msg = (
                    f"{kind} pops a name, but {command.name!r} has not been declared as "
                    "poppable: list it in pop= of @skippable"
                )
                raise SkipError(msg)
            key = self._key(command.name)
            if key not in skips:
                msg = (
                    f"{kind} pops a name, but {command.name!r} has not been stashed: stash it in "
                    "an earlier layer"
                )
                raise SkipError(msg)
            popped.add(command.name)
            return skips[key]
        msg = f"{kind} yields {command!r}: yield stash(name, tensor) or pop(name) only"
        raise SkipError(msg)

    def _check_done(self, stashed: set[str], popped: set[str]) -> None:
        missing = {
            "stashed": [name for name in self._stash if name not in stashed],
            "popped": [name for name in self._pop if name not in popped],
        }
        problems = [  # in the words of torchgpipe, which programs match
            f"{', '.join(map(repr, names))} must be {action} but have not"
            for action, names in missing.items()
            if names
        ]
        if problems:
            msg = (
                f"{type(self.module).__name__} declares names that its forward does not use: "
                f"{'; '.join(problems)}. Remove them from @skippable, or use them"
            )
            raise SkipError(msg)

    def __repr__(self) -> str:
        return f"@skippable({self.module})"


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], Callable[..., Skippable]]:
    """Return a decorator for module classes with a forward that yields `stash` and `pop`.

    Args:
        stash: Names that the module stashes.
        pop: Names that the module pops.

    Returns:
        Decorator; the decorated name creates a `Skippable` around an instance of the class.
    """
    stashed, popped = tuple(stash), tuple(pop)

    def decorate(cls: type[nn.Module]) -> Callable[..., Skippable]:
        def make(*args: Any, **kwargs: Any) -> Skippable:
            return Skippable(cls(*args, **kwargs), stashed, popped)

        make.__name__, make.__doc__, make.__module__ = cls.__name__, cls.__doc__, cls.__module__
        make.__qualname__ = cls.__qualname__
        make.wrapped = cls  # type: ignore[attr-defined]
        cls.__qualname__ += ".wrapped"  # pickle finds the class by this name
        return make

    return decorate


def verify_skippables(layers: Iterable[nn.Module]) -> None:
    """Check that each name is stashed once, and popped once by a later layer.

    Args:
        layers: Layers of a model, in order, or an `nn.Sequential`.

    Raises:
        TypeError: Names do not match; the message lists all problems.
    """
    problems: list[str] = []  # in the words of torchgpipe, which programs match
    stashed: set[SkipKey] = set()
    popped: set[SkipKey] = set()
    for number, layer in enumerate(layers):
        stashes, pops = map(set, skips_of(layer))
        problems += [
            f"'{number}' declared {key.name!r} both as stashable and as poppable"
            for key in stashes & pops
        ]
        stashes, pops = stashes - pops, pops - stashes
        for word, again in (("stashable", stashes & stashed), ("poppable", pops & popped)):
            problems += [
                f"'{number}' redeclared {key.name!r} as {word} but not isolated by namespace"
                for key in again
            ]
        problems += [
            f"'{number}' declared {key.name!r} as poppable but it was not stashed"
            for key in pops - popped - stashed
        ]
        stashed |= stashes
        popped |= pops
    problems += [
        f"no module declared {key.name!r} as poppable but stashed" for key in stashed - popped
    ]
    if problems:
        msg = (
            f"one or more pairs of stash and pop do not match: {'; '.join(problems)}. Stash each "
            "name once, and pop it once in a later layer"
        )
        raise TypeError(msg)
