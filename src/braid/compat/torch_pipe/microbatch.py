"""`torch.distributed.pipeline.sync.microbatch`: the inputs of a Pipe as micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["NoChunk", "check", "gather", "scatter"]


class NoChunk:
    """Wrapper of a tensor that every micro-batch gets as a whole.

    Args:
        inp: The tensor.

    Raises:
        TypeError: `inp` is not a tensor.
    """

    def __init__(self, inp: Any) -> None:
        if not isinstance(inp, torch.Tensor):
            msg = f"NoChunk only supported for tensors, found: {inp}"
            raise TypeError(msg)
        self._tensor: torch.Tensor = inp

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor."""
        return self._tensor


def check(first_device: torch.device, *inputs: Any) -> None:
    """Check the inputs of a Pipe.

    Raises:
        TypeError: No input is a tensor.
        ValueError: A tensor is not on the device of the first stage.
    """
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if not tensors:
        msg = f"inputs do not have any tensors: {inputs}: pass at least one tensor to be split"
        raise TypeError(msg)
    devices = [str(x.device) for x in tensors]
    if any(x.device != first_device for x in tensors):
        msg = (
            "All inputs should be on the same device as the first partition, "
            f"{first_device}, got {', '.join(devices)}"
        )
        raise ValueError(msg)


def scatter(*inputs: Any, chunks: int) -> list[tuple[Any, ...]]:
    """Split the tensors in `inputs` along dim 0, as `torch.chunk` does.

    Args:
        inputs: Tensors to split; NoChunk and other values, which every micro-batch gets.
        chunks: Largest number of micro-batches.

    Returns:
        The inputs of each micro-batch.

    Raises:
        RuntimeError: The tensors give different numbers of micro-batches.
    """
    split = [x.chunk(chunks) if isinstance(x, torch.Tensor) else None for x in inputs]
    counts = sorted({len(parts) for parts in split if parts is not None})
    if len(counts) > 1:
        msg = (
            "Found different number of chunks produced for inputs: "
            f"{' and '.join(map(str, counts))}: wrap tensors without rows of the batch in NoChunk"
        )
        raise RuntimeError(msg)
    shared = [x.tensor if isinstance(x, NoChunk) else x for x in inputs]
    return [
        tuple(x if parts is None else parts[i] for x, parts in zip(shared, split, strict=True))
        for i in range(counts[0])
    ]


def gather(outputs: Sequence[Any]) -> Any:
    """Concatenate the tensors in the outputs of micro-batches.

    Args:
        outputs: A tensor, or a tuple of tensors and other values, per micro-batch.

    Returns:
        A tensor or a tuple; other values than tensors become lists with a value per micro-batch.

    Raises:
        TypeError: An output has no tensors, or the micro-batches have outputs of different types.
    """
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return _joined(outputs)
    for output in outputs:
        values = output if isinstance(output, tuple | list) else ()
        if not any(isinstance(x, torch.Tensor) for x in values):
            msg = (
                f"No tensors found in batch: {output!r}: return a tensor, or a tuple with tensors, "
                "for every micro-batch"
            )
            raise TypeError(msg)
    lengths = [len(output) for output in outputs]
    if len(set(lengths)) > 1:
        msg = f"micro-batches returned tuples of different lengths, {lengths}: return equal lengths"
        raise TypeError(msg)
    return tuple(_joined(values) for values in zip(*outputs, strict=True))


def _joined(values: Sequence[Any]) -> Any:
    """Return one value of all micro-batches: a tensor, or a list."""
    kinds = list(dict.fromkeys(map(type, values)))
    if len(kinds) > 1:
        msg = (
            "Types for microbatch outputs do not match, found: "
            f"{' and '.join(map(str, kinds))}: return the same type for every micro-batch"
        )
        raise TypeError(msg)
    return torch.cat(list(values)) if isinstance(values[0], torch.Tensor) else list(values)
