"""Models to profile and to plan, as lists of layers: GPTs by name, and the user's models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.graph.conversion import load_model
from braid.parallel.tensor_parallel import parallelize
from braid.plan.axes import sequence_axis
from braid.plan.described.model import DescribedModel
from braid.plan.described.operations import LayerOperations, count_operations
from braid.plan.find import DTYPES, captured_layers, described_layers
from braid.plan.lone_rank import LoneRank
from braid.programs.topology import Device
from braid.train.config import MODELS, ModelSize
from braid.train.gpt import GPT, mean_loss

__all__ = ["Layers", "captured", "described", "gpt", "gpt_name", "layers_of"]

LARGEST_TENSOR = 16  # largest tensor-parallel size to plan with


class Layers(NamedTuple):
    """A model as a list of layers.

    Attributes:
        model: Name of the model.
        named: Layers with their names.
        sample: Function that returns an input of the first layer with a number of rows.
        ranks: Ranks over which the layers are sharded, if they are sharded.
        loss: Loss of the last layer's output; None if unknown.
    """

    model: str
    named: list[tuple[str, nn.Module]]
    sample: Callable[[int], Any]
    ranks: LoneRank | None = None
    loss: Callable[[torch.Tensor], torch.Tensor] | None = None


def gpt_name(model: str) -> str:
    """Return the name in `MODELS` of a GPT such as gpt2-tiny.

    Raises:
        ConfigError: `MODELS` does not have the model.
    """
    key = model if model in MODELS else model.removeprefix("gpt2-")
    if key not in MODELS:
        known = ", ".join(("gpt2-tiny", "gpt2-mini", "gpt2-small", *list(MODELS)[4:]))
        msg = f"--model must be one of {known}, got {model!r}"
        raise ConfigError(msg)
    return key


def gpt(
    model: str,
    context: int,
    *,
    tensor: int = 1,
    group: Group | None = None,
    size: ModelSize | None = None,
    device: torch.device | str = "cpu",
    dtype: str = "fp32",
) -> Layers:
    """Return the layers of a GPT.

    Args:
        model: Name of the model.
        context: Bytes of a sequence.
        tensor: Tensor-parallel size; only the shard of one rank is built, without a group.
        group: Ranks over which each layer is sharded.
        size: Size to use instead of the model's size.
        device: Device of the layers and of the samples.
        dtype: Dtype of matrix products, as in `GPT`.

    Raises:
        ConfigError: The model is unknown, or its heads cannot be divided over the ranks.
    """
    key = gpt_name(model)
    whole = GPT(size or MODELS[key], context, tied=False, dtype=dtype).to(device)
    ranks = LoneRank(tensor) if tensor > 1 else None
    sharing = group or ranks
    if sharing is not None:
        parallelize(whole, sharing)
    generator = torch.Generator().manual_seed(0)

    def sample(rows: int) -> torch.Tensor:
        return torch.randint(0, 256, (rows, context), generator=generator).to(device)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return mean_loss(logits, torch.zeros(logits.shape[:2], dtype=torch.int64, device=device))

    named = [(str(i), layer) for i, layer in enumerate(whole.layers())]
    return Layers(key, named, sample, ranks, loss)


def layers_of(
    target: str,
    model: str,
    context: int,
    *,
    tensor: int = 1,
    device: torch.device | str = "cpu",
    dtype: str = "fp32",
) -> Layers:
    """Return the layers of the GPT `model` or of the user's model `target`.

    The user's model keeps its device and its dtypes.

    Raises:
        ConfigError: Neither or both of `target` and `model` are set.
    """
    if bool(target) == bool(model):
        msg = "no model is named: give MODULE:FUNCTION, or --model NAME"
        raise ConfigError(msg)
    if not model:
        return captured(target)
    return gpt(model, context, tensor=tensor, device=device, dtype=dtype)


def captured(target: str) -> Layers:
    """Capture a user's model, and return it cut into the largest possible number of layers.

    Args:
        target: MODULE:FUNCTION or FILE:FUNCTION; the function returns a model and its example
            arguments.
    """
    file, colon, function = target.partition(":")
    if file.endswith(".py"):
        sys.path.insert(0, str(Path(file).resolve().parent))
        target = f"{Path(file).stem}:{function if colon else 'make'}"
    elif "" not in sys.path:
        sys.path.insert(0, "")  # modules of this directory, as for `python -m`
    made = load_model(target)
    return Layers(target, *captured_layers(made.model, *made.args, **made.kwargs))


def described(
    target: str, model: str, context: int, device: Device, dtype: str
) -> tuple[DescribedModel, list[str]]:
    """Return a model's costs on a device without measuring them, and its layers' names."""
    if not model:
        layers = layers_of(target, model, context)
        operations = _counted(layers, dtype)
        names = [name for name, _ in layers.named]
        return described_layers(layers.model, layers.named, operations, device, dtype), names
    key = gpt_name(model)
    size = MODELS[key]
    one = ModelSize(1, size.width, size.heads)  # all blocks are equal, so one is counted
    by_tensor: dict[int, Sequence[LayerOperations]] = {}
    for tensor in range(1, min(size.heads, LARGEST_TENSOR) + 1):
        if size.heads % tensor == 0:
            first, block, last = _counted(gpt(key, context, tensor=tensor, size=one), dtype)
            blocks = [
                block._replace(name=str(i), params=tuple(1000 * i + n for n in block.params))
                for i in range(1, size.layers + 1)
            ]
            by_tensor[tensor] = [first, *blocks, last._replace(name=str(size.layers + 1))]
    names = [layer.name for layer in by_tensor[1]]
    sequences = sequence_axis(context, has_attention=True)
    model_costs = DescribedModel(key, by_tensor, device, dtype, sequence_sizes=sequences.sizes)
    return model_costs, names


def _counted(layers: Layers, dtype: str) -> list[LayerOperations]:
    return count_operations(layers.named, layers.sample, dtype=DTYPES[dtype], ranks=layers.ranks)
