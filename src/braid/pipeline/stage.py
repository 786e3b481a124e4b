"""One stage: some layers, and what it keeps of each micro-batch between forward and backward.

A boundary between stages carries any containers of tensors. Inputs are cut off from the graph of
the previous stage; backward continues from their gradients there, on whichever rank it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.autograd.nested import map_tensors, tensors_in
from braid.pipeline.split_backward import SplitBackward

__all__ = ["Layer", "Stage", "StageError"]


class Layer(NamedTuple):
    """A module of the model, with its name there."""

    name: str
    module: nn.Module


class StageError(Exception):
    """An exception in a layer.

    Attributes:
        layer: Name and type of the layer.
        error: The exception.
    """

    def __init__(self, layer: str, error: Exception) -> None:
        super().__init__(layer)
        self.layer = layer
        self.error = error


class _Pass(NamedTuple):
    """One forward that has no backward yet."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class Stage:
    """The layers of one stage.

    Args:
        index: Number of the stage.
        layers: Its layers, in order.
    """

    def __init__(self, index: int, layers: Sequence[Layer]) -> None:
        self.index = index
        self.layers = tuple(layers)
        self._passes: dict[int, _Pass] = {}
        self._split: dict[int, SplitBackward] = {}  # whose weights are still to come

    @property
    def num_held(self) -> int:
        """Number of micro-batches whose activations are held."""
        return len(self._passes) + len(self._split)

    def forward(self, microbatch: int, value: Any, *, keeps: bool) -> Any:
        """Run the layers on a micro-batch.

        Args:
            microbatch: Number of the micro-batch.
            value: Output of the previous stage, or a part of the batch.
            keeps: Whether a backward follows.

        Raises:
            StageError: A layer raises an exception.
        """
        value = map_tensors(value, _cut_off)
        inputs = _with_grad(value)
        with torch.set_grad_enabled(keeps):
            for layer in self.layers:
                try:
                    value = layer.module(value)
                except Exception as exc:
                    raise StageError(f"{layer.name} ({type(layer.module).__name__})", exc) from exc
        if keeps:
            self._passes[microbatch] = _Pass(inputs, _with_grad(value))
        return value

    def replace_outputs(self, microbatch: int, value: Any) -> None:
        """Let the backward of a micro-batch begin at other tensors, such as a loss."""
        self._passes[microbatch] = self._passes[microbatch]._replace(outputs=_with_grad(value))

    def backward(self, microbatch: int, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the backward of a micro-batch, and return the gradients of its inputs.

        An input that the stage did not use has a gradient of zeros.

        Args:
            microbatch: Number of the micro-batch.
            grads: Gradients of the outputs that require one, in their order.
        """
        own = self._passes.pop(microbatch)
        if own.outputs:
            torch.autograd.backward(own.outputs, list(grads))
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in own.inputs]

    def backward_to_inputs(
        self, microbatch: int, grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the gradients of a micro-batch's inputs; `backward_to_weights` does the rest."""
        own = self._passes.pop(microbatch)
        params = [p for layer in self.layers for p in layer.module.parameters() if p.requires_grad]
        self._split[microbatch] = SplitBackward(own.outputs, own.inputs, params)
        return self._split[microbatch].to_inputs(grads)

    def backward_to_weights(self, microbatch: int) -> None:
        """Add the gradients of the parameters for a micro-batch."""
        self._split.pop(microbatch).to_weights()

    def gradients_like(self, microbatch: int) -> list[torch.Tensor]:
        """Return empty tensors for the gradients of a micro-batch's outputs."""
        return [torch.empty_like(x) for x in self._passes[microbatch].outputs]

    def clear(self) -> None:
        """Forget all forwards, after a failure."""
        self._passes.clear()
        self._split.clear()


def _with_grad(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value that need a gradient, each once."""
    return list({id(x): x for x in tensors_in(value) if x.requires_grad}.values())


def _cut_off(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(x.requires_grad)
