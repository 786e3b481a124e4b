"""Models as lists of modules with named inputs and outputs, in the order of execution.

    [(embed,   ["ids"],         ["x"]),
     (encoder, ["x", "mask"],   ["memory"]),
     (decoder, ["x", "memory"], ["x"]),
     (head,    ["x"],           ["logits"])]

Names that no earlier module outputs are inputs of the model. Between layers, a dictionary is passed
on with the values that later layers still need.

Source: A. Harlap et al., PipeDream (2018), with generated models of this form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from braid.errors import ConfigError

__all__ = ["Wired", "wired"]

Wire = tuple[nn.Module, Sequence[str], Sequence[str]]


class Wired(nn.Module):
    """Layer that reads a module's inputs from a dictionary, and adds its outputs to the dictionary.

    Args:
        module: The module.
        inputs: Names of the module's arguments, in order.
        outputs: Names of the module's results, in order; one name for a single result of any kind.
        kept: Names that later layers need.
        batch: Names of the model's inputs, for the first layer; they are passed as a dictionary, as
            a tuple in this order, or alone if there is one.
        is_last: Whether to return the results instead of the dictionary.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        kept: frozenset[str],
        batch: Sequence[str] = (),
        is_last: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._kept = kept
        self._batch = tuple(batch)
        self._is_last = is_last

    def forward(self, value: Any) -> Any:
        """Run the module on its inputs in the dictionary, or in the batch for the first layer."""
        values = self._named(value) if self._batch else dict(value)
        result = self.module(*(values[name] for name in self._inputs))
        if self._is_last:
            return result
        results = (result,) if len(self._outputs) == 1 else tuple(result)
        if len(results) != len(self._outputs):
            msg = (
                f"{type(self.module).__name__} returned {len(results)} values, but its outputs "
                f"are {', '.join(self._outputs)}: return one value per name"
            )
            raise ConfigError(msg)
        values.update(zip(self._outputs, results, strict=True))
        return {name: values[name] for name in values if name in self._kept}

    def _named(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Mapping):
            missing = [name for name in self._batch if name not in value]
            if not missing:
                return {name: value[name] for name in self._batch}
        elif isinstance(value, torch.Tensor) and len(self._batch) == 1:
            return {self._batch[0]: value}
        elif isinstance(value, list | tuple) and len(value) == len(self._batch):
            return dict(zip(self._batch, value, strict=True))
        shown = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        names = ", ".join(self._batch)
        msg = f"the model needs the inputs {names}, by name or in this order, got {shown}"
        raise ConfigError(msg)


def wired(layers: Sequence[Wire]) -> list[Wired]:
    """Convert a list of (module, inputs, outputs) to a list of modules.

    Raises:
        ConfigError: The list is empty, names are not lists of names, or an output is never used.
    """
    problems = []
    made: set[str] = set()
    batch: list[str] = []
    for number, (_, inputs, outputs) in enumerate(layers):
        if isinstance(inputs, str) or isinstance(outputs, str) or not inputs or not outputs:
            problems.append(
                f"layer {number} needs a list of input names and a list of output names"
            )
            continue
        batch += [name for name in inputs if name not in made and name not in batch]
        made.update(outputs)
        if number + 1 < len(layers):
            used = {name for _, later, _ in layers[number + 1 :] for name in later}
            problems += [
                f"output {name} of layer {number} is never used"
                for name in outputs
                if name not in used
            ]
    if problems or not layers:
        raise ConfigError("; ".join(problems) or "a model needs at least one layer")
    return [
        Wired(
            module,
            inputs,
            outputs,
            kept=frozenset(name for _, later, _ in layers[number + 1 :] for name in later),
            batch=() if number else batch,
            is_last=number + 1 == len(layers),
        )
        for number, (module, inputs, outputs) in enumerate(layers)
    ]
