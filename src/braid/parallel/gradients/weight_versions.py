"""Several versions of the same weights, while forwards of old ones wait for their backward.

Problem: an asynchronous pipeline steps between the forward of a micro-batch and its backward, which
must use the weights of the forward. Autograd keeps references to weights: changed in place they are
refused, and through `.data` the backward silently takes the new ones.

Idea: a forward gets tensors of its own (`torch.func.functional_call`), which share memory with the
parameters as long as these do not change. Before a step, parameters move to a copy if an older
version is still needed; else the step is in place. So n versions take the memory of n.

    version 0   ████  forward 0 ........ backward 0
    version 1         ████  forward 1 ........ backward 1     the parameters are the newest
    step              ^ copied, since backward 0 needs version 0

Source: D. Narayanan et al., PipeDream, SOSP 2019, section 3.3 (weight stashing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

__all__ = ["WeightVersion", "WeightVersions"]


class WeightVersion:
    """One version of the weights of some modules.

    Args:
        tensors: Its tensors, by parameter.
        end: Called when one of its uses has ended.
    """

    def __init__(self, tensors: dict[nn.Parameter, torch.Tensor], end: Callable[[], None]) -> None:
        self.tensors = tensors
        self._end = end

    def call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module with these weights."""
        named = module.named_parameters(remove_duplicate=False)
        weights = {name: self.tensors[param] for name, param in named}
        return functional_call(module, weights, args, kwargs)

    def add_gradients(self) -> None:
        """Move the gradients of a backward to the parameters; one forward needs these no more."""
        for param, tensor in self.tensors.items():
            grad, tensor.grad = tensor.grad, None
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        self._end()


class WeightVersions:
    """The versions of some parameters, which an optimizer steps.

    Version v is what v steps have made of them, from the last `begin` on.

    Args:
        params: The parameters; their `.data` may be replaced by copies.

    Attributes:
        most_live: Largest number of versions at a time so far.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(dict.fromkeys(params))
        self._versions: dict[int, WeightVersion] = {}
        self._uses: Counter[int] = Counter()
        self._newest = 0
        self._gradients: list[int] = []  # versions of those that no step has used
        self.most_live = 0

    @property
    def num_live(self) -> int:
        """Number of versions that are in memory now."""
        return len(self._versions)

    def begin(self, uses: Iterable[int]) -> None:
        """Begin with version 0, which the parameters are now.

        Args:
            uses: Version of each forward to come that has a backward.
        """
        self._versions.clear()
        self._gradients.clear()
        self._uses = Counter(uses)
        self._newest = 0
        self._add()

    def use(self, version: int) -> WeightVersion:
        """Return a version for a forward; its `add_gradients` ends the use."""
        return self._versions[version]

    def step(self, step: Callable[[], None]) -> list[int]:
        """Make the next version.

        Args:
            step: Changes the parameters in place.

        Returns:
            Age of each gradient that the step uses: the steps made since the version of its
            forward.

        Cost: a copy of the parameters if an older version is still needed.
        """
        if self._uses[self._newest]:
            for param in self._params:
                if param.requires_grad:  # others are not stepped
                    param.data = param.data.clone(memory_format=torch.preserve_format)
        else:
            del self._versions[self._newest]
        step()
        ages = [self._newest - version for version in self._gradients]
        self._gradients.clear()
        self._newest += 1
        self._add()
        return ages

    def _add(self) -> None:
        version = self._newest
        # of `data`, whose changes autograd does not count: memory is never changed while in use
        tensors = {p: p.data.requires_grad_(p.requires_grad) for p in self._params}
        self._versions[version] = WeightVersion(tensors, lambda: self._end(version))
        self.most_live = max(self.most_live, len(self._versions))

    def _end(self, version: int) -> None:
        self._gradients.append(version)
        self._uses[version] -= 1
        if not self._uses[version] and version != self._newest:
            del self._versions[version]
