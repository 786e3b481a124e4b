"""Several versions of the same weights, kept until the backwards of old forwards have run.

Problem: an asynchronous pipeline steps between the forward and the backward of a micro-batch, and
the backward must use the weights of the forward. Autograd keeps references to weights: after an
in-place change it raises, and after a change through `.data` it uses the new weights.

Idea: a forward uses separate tensors (`torch.func.functional_call`), which share memory with the
parameters as long as these do not change. Before a step, parameters move to a copy if an older
version is still needed; else the step is in place. So n versions take the memory of n copies.

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
    """One version of the weights of some modules, for a forward and its backward.

    Args:
        tensors: Values of this version, by parameter.
        end: Called when a micro-batch no longer needs the version.
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
        """Add gradients of these weights to `.grad` of the parameters; end a use of the version."""
        for param, tensor in self.tensors.items():
            grad, tensor.grad = tensor.grad, None
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        self._end()


class WeightVersions:
    """Versions of the weights of an asynchronous pipeline's stage, as its optimizer steps.

    Version v is the result of v steps since the last `begin`.

    Args:
        params: The parameters; their `.data` may be replaced by copies.

    Attributes:
        most_live: Largest number of simultaneous versions so far.
    """

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(dict.fromkeys(params))
        self._versions: dict[int, WeightVersion] = {}
        self._uses: Counter[int] = Counter()
        self._newest = 0
        self._gradients: list[int] = []  # versions of gradients that no step has used yet
        self.most_live = 0

    @property
    def num_live(self) -> int:
        """Number of versions in memory."""
        return len(self._versions)

    def begin(self, uses: Iterable[int]) -> None:
        """Begin a training up to the next flush, with the current parameters as version 0.

        Args:
            uses: Version that each coming forward with a backward will use.
        """
        self._versions.clear()
        self._gradients.clear()
        self._uses = Counter(uses)
        self._newest = 0
        self._add()

    def use(self, version: int) -> WeightVersion:
        """Return a version for one forward; `add_gradients` of the version ends this use."""
        return self._versions[version]

    def step(self, step: Callable[[], object]) -> list[int]:
        """Create the next version of the weights by calling `step`.

        Args:
            step: Function that changes the parameters in place.

        Returns:
            Age of each gradient that the step uses: the number of steps since the version of its
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
        # from `data`, without autograd's version counter: memory in use is never changed
        tensors = {p: p.data.requires_grad_(p.requires_grad) for p in self._params}
        self._versions[version] = WeightVersion(tensors, lambda: self._end(version))
        self.most_live = max(self.most_live, len(self._versions))

    def _end(self, version: int) -> None:
        self._gradients.append(version)
        self._uses[version] -= 1
        if not self._uses[version] and version != self._newest:
            del self._versions[version]
