"""`torchgpipe.GPipe`: pipeline parallelism of an nn.Sequential over the devices of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from braid.compat.torchgpipe.microbatch import check
from braid.parallel.pipeline.device_pipeline import DevicePipeline
from braid.runtime.torch_internals import own_modules

__all__ = ["BalanceError", "GPipe"]

CHECKPOINTS = ("always", "except_last", "never")


class BalanceError(ValueError):
    """Error if the balance does not fit the module."""


class GPipe(DevicePipeline):
    """Pipeline of an `nn.Sequential` in stages on several devices.

    Args:
        module: The model.
        balance: Number of layers on each device; see `braid.compat.torchgpipe.balance`.
        devices: Devices; when None, all CUDA devices, or the CPU without any.
        chunks: Number of micro-batches.
        checkpoint: Micro-batches that are recomputed in backward: `always`, `except_last` or
            `never`.
        deferred_batch_norm: Whether running statistics are updated once per batch instead of once
            per micro-batch.

    Raises:
        TypeError: `module` is not an nn.Sequential, or skip connections do not match.
        ValueError: An argument is out of range; a BalanceError for the balance.
        IndexError: There are fewer devices than partitions.
    """

    def __init__(
        self,
        module: nn.Module,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        chunks = int(chunks)
        if balance is None:
            msg = (
                "balance is required: give the number of layers on each device, or find it with "
                "balance_by_time(partitions, module, sample) or balance_by_size(...) of "
                "braid.compat.torchgpipe.balance"
            )
            raise ValueError(msg)
        if chunks <= 0:
            msg = f"number of chunks must be positive integer, got {chunks}"
            raise ValueError(msg)
        mode = next((text for text in CHECKPOINTS if text == checkpoint), None)
        if mode is None:
            msg = (
                f"checkpoint is not one of 'always', 'except_last', or 'never', got {checkpoint!r}"
            )
            raise ValueError(msg)
        if not isinstance(module, nn.Sequential):
            msg = f"module must be nn.Sequential to be partitioned, got {type(module).__name__}"
            raise TypeError(msg)
        numbers = list(balance)
        _check_balance(numbers, len(module))
        stage_devices = _devices(len(numbers)) if devices is None else list(devices)
        if len(stage_devices) < len(numbers):
            msg = (
                f"too few devices to hold given partitions (devices: {len(stage_devices)}, "
                f"partitions: {len(numbers)}): pass one device per partition"
            )
            raise IndexError(msg)
        super().__init__(
            module,
            stage_devices,
            balance=numbers,
            num_microbatches=chunks,
            recompute=mode,
            deferred_batch_norm=deferred_batch_norm,
        )

    @property
    def chunks(self) -> int:
        """Number of micro-batches."""
        return self.num_microbatches

    @chunks.setter
    def chunks(self, value: int) -> None:
        self.num_microbatches = value

    @property
    def checkpoint(self) -> str:
        """Micro-batches that are recomputed in backward."""
        return self.recompute

    @checkpoint.setter
    def checkpoint(self, value: str) -> None:
        self.recompute = value

    def forward(self, input: Any) -> Any:  # noqa: A002 - the original's name
        """Return the model's output for a tensor or a tuple of tensors, on the last device."""
        check(input)
        return super().forward(input)

    def _sizes_of(self, rows: int) -> list[int]:
        """Return the sizes of `torch.chunk`, which torchgpipe uses."""
        return [len(part) for part in torch.empty(rows).chunk(self.chunks)] if rows else []

    def __len__(self) -> int:
        return sum(self.balance)

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def __iter__(self) -> Iterator[nn.Module]:
        yield from chain.from_iterable(own_modules(part).values() for part in self.partitions)

    def cuda(self, device: Any = None) -> GPipe:  # noqa: ARG002 - the signature of modules
        """Raise TypeError: the model cannot be moved, since its stages are on different devices."""
        raise self._moving_denied()

    def cpu(self) -> GPipe:
        """Raise TypeError: the model cannot be moved, since its stages are on different devices."""
        raise self._moving_denied()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the dtype; raise TypeError for a device, since stages are on different devices."""
        moves = {"device", "tensor"} & set(kwargs)
        if moves or (args and isinstance(args[0], torch.device | int | str | torch.Tensor)):
            raise self._moving_denied()
        return super().to(*args, **kwargs)

    def _moving_denied(self) -> TypeError:
        name = type(self).__name__
        return TypeError(
            f"a {name} places its layers on its devices itself: move the module before you wrap it"
        )


def _check_balance(balance: Sequence[int], num_layers: int) -> None:
    if num_layers != sum(balance):
        msg = (
            f"module and sum of balance have different length (module: {num_layers}, sum of "
            f"balance: {sum(balance)}): give each layer to one partition"
        )
        raise BalanceError(msg)
    if any(number <= 0 for number in balance):
        msg = f"all balance numbers must be positive integer (balance: {list(balance)})"
        raise BalanceError(msg)


def _devices(num_stages: int) -> list[torch.device]:
    count = torch.cuda.device_count()
    if not count:
        return [torch.device("cpu")] * num_stages
    return [torch.device("cuda", index) for index in range(count)]
