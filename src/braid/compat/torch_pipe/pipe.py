"""`torch.distributed.pipeline.sync.Pipe`: a pipeline over the devices that its layers are on.

    fc1.to("cuda:0"), fc2.to("cuda:1")
    Pipe(nn.Sequential(fc1, fc2)) ──> one stage per device ──> a GPipe program on threads

Consecutive children of the nn.Sequential on the same GPU are one stage; on the CPU every child is a
stage. An nn.Sequential among the children is replaced by its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from braid.compat.torch_pipe.microbatch import check, gather, scatter
from braid.compat.torch_rpc.rpc import RRef
from braid.compat.torchgpipe.gpipe import BalanceError, GPipe
from braid.errors import StaleError
from braid.parallel.pipeline.skip import verify_skippables
from braid.parallel.pipeline.stage import Layer
from braid.rpc.current import current_agent
from braid.runtime.torch_internals import own_modules

__all__ = ["BalanceError", "Pipe", "PipeSequential", "WithDevice"]

CPU = torch.device("cpu")


class PipeSequential(nn.Sequential):
    """Variant of `nn.Sequential` in which a tuple becomes several arguments of the next layer."""

    def forward(self, *inputs: Any) -> Any:
        """Return the output of the last layer."""
        value: Any = inputs
        for module in self:
            value = module(*value) if isinstance(value, tuple) else module(value)
        return value


class WithDevice(nn.Module):
    """Wrapper that sets the device of a layer of a Pipe.

    Args:
        module: The layer, such as one without parameters.
        device: Device for the layer.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | int) -> None:
        super().__init__()
        self._module = module
        self._device = torch.device(device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer."""
        return self._module(*args, **kwargs)

    @property
    def device(self) -> torch.device:
        """Device for the layer."""
        return self._device

    @property
    def module(self) -> nn.Module:
        """The layer."""
        return self._module


class Pipe(GPipe):
    """Pipeline of an `nn.Sequential` over the devices that its layers are on.

    Args:
        module: The model, with every layer on its device, or in `WithDevice`.
        chunks: Number of micro-batches.
        checkpoint: Micro-batches that are recomputed in backward: `always`, `except_last` or
            `never`.
        deferred_batch_norm: Whether running statistics are updated once per batch instead of once
            per micro-batch.

    Raises:
        StaleError: RPC has not been initialized.
        TypeError: `module` is not an nn.Sequential, or skip connections do not match.
        ValueError: An argument is out of range, a layer has parameters on several devices, or a
            layer occurs twice.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        try:
            current_agent()
        except StaleError as exc:
            msg = (
                "Please initialize RPC framework for Pipe using init_rpc: "
                'braid.compat.torch_rpc.rpc.init_rpc("worker", rank=0, world_size=1)'
            )
            raise StaleError(msg) from exc
        stages = list(_stages(module))
        layers = nn.Sequential(*(layer for _, stage in stages for layer in stage))
        verify_skippables(layers)
        super().__init__(
            layers,
            [len(stage) for _, stage in stages],
            devices=[device for device, _ in stages],
            chunks=chunks,
            checkpoint=checkpoint,
            deferred_batch_norm=deferred_batch_norm,
        )
        parts = [PipeSequential(*_children(part)) for part in self.partitions]
        self.partitions = nn.ModuleList(parts)

    def forward(self, *inputs: Any) -> Any:
        """Return an RRef of the output of a batch, on the last device.

        Args:
            inputs: Tensors on the first device, which are split along dim 0; NoChunk and other
                values, which every micro-batch gets.

        Returns:
            RRef of a tensor or a tuple; `local_value()` returns it. Values in the tuple that are
            not tensors become lists with a value per micro-batch.

        Raises:
            TypeError: No input is a tensor, or micro-batches have outputs of different types.
            ValueError: A tensor is not on the first device.
        """
        check(self.devices[0] if self.devices else CPU, *inputs)
        if not self.devices:
            return RRef(*inputs)
        return RRef(super(GPipe, self).forward(inputs))

    def _scatter(self, batch: Any) -> tuple[list[int], list[Any]]:
        microbatches = scatter(*batch, chunks=self.chunks)
        number = next(i for i, x in enumerate(batch) if isinstance(x, torch.Tensor))
        sizes = [len(parts[number]) for parts in microbatches]
        return (sizes if sum(sizes) else []), microbatches

    def _gather(self, outputs: list[Any]) -> Any:
        return gather(outputs)

    def _parts(self) -> list[list[Layer]]:
        return [[Layer(str(i), _PipeStage(part))] for i, part in enumerate(self.partitions)]


class _PipeStage(nn.Module):
    """Stage whose input, a tuple, becomes several arguments of the first layer."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.training = part.training

    def forward(self, value: Any) -> Any:
        return self.part(*value) if isinstance(value, tuple) else self.part(value)


def _stages(module: nn.Module) -> Iterator[tuple[torch.device, list[nn.Module]]]:
    """Yield the device and the layers of each stage."""
    if not isinstance(module, nn.Sequential):
        msg = f"module must be nn.Sequential to be partitioned, got {type(module).__name__}"
        raise TypeError(msg)
    children = _children(module)
    if len(set(children)) != len(children):
        msg = "module with duplicate children is not supported: copy layers that occur twice"
        raise ValueError(msg)
    stage: tuple[torch.device, list[nn.Module]] | None = None
    for child in children:
        device, layer = _placed(child)
        if stage is not None and (device != stage[0] or device.type == "cpu"):
            yield stage
            stage = None
        stage = stage or (device, [])
        stage[1].extend(_layers(layer))
    if stage is not None:
        yield stage


def _placed(module: nn.Module) -> tuple[torch.device, nn.Module]:
    """Return the device of a child and the layer itself."""
    if isinstance(module, WithDevice):
        return module.device, module.module
    devices = list(dict.fromkeys(p.device for p in module.parameters()))
    if len(devices) > 1:
        msg = (
            f"nn.Module: {module}, should have all parameters on a single device, please use .to() "
            f"to place the module on a single device, got {', '.join(map(str, devices))}"
        )
        raise ValueError(msg)
    return (devices[0] if devices else CPU), module


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of an nn.Sequential; any other module is one layer."""
    plain = {nn.Sequential.forward, PipeSequential.forward}
    if isinstance(module, nn.Sequential) and type(module).forward in plain:
        return _children(module) or [module]
    return [module]


def _children(module: nn.Module) -> list[nn.Module]:
    """Return the children of a module; one that occurs twice is in the list twice."""
    return [child for child in own_modules(module).values() if child is not None]
