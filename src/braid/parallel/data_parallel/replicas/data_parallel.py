"""DataParallel: one process, several devices, one replica of the module on each.

The simplest way to use the GPUs of one machine: nothing to launch, no ranks. Each forward cuts the
batch, copies the module to all devices, runs the replicas in threads and gathers their outputs on
one device. Backward sums the replicas' gradients there. The price: the module travels at every
step, and Python holds one lock for all replicas. The first device holds the outputs of the whole
batch and computes the loss of it alone, so it runs out of memory first.

With `criterion` the last part goes away: every replica computes the loss of its own share of the
targets on its own device, and only losses travel.

    DataParallel(model)(x)                    outputs of the whole batch on the first device
    DataParallel(model, criterion=F.cross_entropy)(x, target=y)
                                              the loss of the whole batch, nothing else

Source: torch's DataParallel (`torch/nn/parallel/data_parallel.py`), whose signature, attributes and
overridable steps this has. What differs: works on the CPU; sums gradients in the order of replicas;
shares differ by one sample at most; what replica 0's forward assigns survives; no warning where
replicas return scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from braid.errors import ConfigError
from braid.parallel.data_parallel.devices import DeviceLike, as_device, devices_for
from braid.parallel.data_parallel.replicas.gather import gather
from braid.parallel.data_parallel.replicas.loss import (
    check_criterion,
    is_mean_of_targets,
    mean_of,
    reduction_of,
    share_of_mean,
)
from braid.parallel.data_parallel.replicas.parallel_apply import parallel_apply
from braid.parallel.data_parallel.replicas.replicate import refuse_compiled, replicate, write_back
from braid.parallel.data_parallel.replicas.scatter import num_samples, scatter
from braid.parallel.data_parallel.sync_batch_norm import SyncBatchNorm

__all__ = ["DataParallel"]

REDUCTIONS = ("mean", "sum", "none")


class DataParallel(nn.Module):
    """Wraps a module so that each forward uses several devices.

    Attributes of the module that this does not have can be read from here.

    Args:
        module: Module; moved to the first device.
        device_ids: Devices, by default all GPUs, or where the module is if there are none. One may
            occur several times.
        output_device: Device of outputs, by default the first one; -1 is the CPU.
        dim: Dim along which samples lie.
        criterion: Function `criterion(output, target)`, which every replica calls with its own
            share in forwards that are passed `target=`. Other forwards return outputs, as in
            evaluation. A module is replicated with the wrapped one.
        reduction: Reduction of the criterion: `mean` over samples, `sum`, or `none`, which returns
            what replicas' criteria return as outputs. By default the criterion's own: its attribute
            or argument of this name, also where a `functools.partial` binds it. A criterion without
            one, such as a lambda, is taken for a mean over samples; pass `reduction` if it is
            another one. torch's cross entropies (`CrossEntropyLoss`, `NLLLoss` and their functions)
            may have class weights and ignored targets (`ignore_index`). For other means, such as in
            a lambda, use the sum, and divide by the weights or number of its targets.

    Returns (of forward):
        Outputs of all replicas, concatenated. Tensors without dims, such as losses that the module
        computes itself, become a vector with one element per replica: take `.sum()` of sums; a mean
        of means weighs samples unequally if shares differ in size. With `target`: one loss, that of
        the whole batch up to the order of sums.

    Raises:
        ConfigError: Such devices do not exist, the module is elsewhere, tensors of the batch
            disagree, or the criterion weighs samples or leaves some out in a way that is not known
            here; for several devices, SyncBatchNorm inside, or anything compiled.

    Determinism:
        Outputs and gradients are bitwise those of a loop over the shares that sums gradients in the
        order of replicas, if kernels are deterministic. Random numbers of replicas that share a
        device are not.

    Cost:
        Per step 2 l bytes to and from each other device, l = bytes of the parameters, besides
        inputs and outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
        *,
        criterion: Callable[..., torch.Tensor] | None = None,
        reduction: str | None = None,
    ) -> None:
        super().__init__()
        self.device_ids = devices_for(module, device_ids)
        self.output_device = (
            self.device_ids[0] if output_device is None else as_device(output_device)
        )
        self.dim = dim
        self.criterion = criterion
        self.reduction = reduction_of(criterion) if reduction is None else reduction
        if self.reduction not in REDUCTIONS:
            msg = f"reduction={self.reduction!r} is unknown: choose one of {', '.join(REDUCTIONS)}"
            raise ConfigError(msg)
        if self.reduction == "mean":
            check_criterion(criterion, stated=reduction is not None)
        if len(self.device_ids) > 1:
            _refuse_sync_batch_norm(module)
            for part in (module, criterion):
                if isinstance(part, nn.Module):
                    refuse_compiled(part)
        self.module = module.to(self.device_ids[0])
        if isinstance(criterion, nn.Module):
            criterion.to(self.device_ids[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run one replica per share of the inputs; see the class."""
        with_criterion = self.criterion is not None and "target" in kwargs
        if with_criterion:
            inputs = (*inputs, kwargs.pop("target"))
        shares, options = self.scatter(inputs, kwargs, self.device_ids)
        used = self.device_ids[: len(shares)]
        of_targets = (
            with_criterion
            and len(used) > 1
            and self.reduction == "mean"
            and is_mean_of_targets(self.criterion)
        )
        called = (
            _WithCriterion(self.module, self.criterion, of_targets=of_targets)
            if with_criterion
            else self.module
        )
        self._check_home(called)
        # a single one is the module itself, with everything that its forward may do to it
        replicas = [called] if len(used) == 1 else self.replicate(called, used)
        outputs = self.parallel_apply(replicas, shares, options)
        if len(used) > 1:
            write_back(called, replicas[0])
        if of_targets:
            return mean_of(outputs, self.output_device)
        if with_criterion and self.reduction != "none":
            return self._total_loss(outputs, [*zip(shares, options, strict=True)])
        return self.gather(outputs, self.output_device)

    # Steps that subclasses replace, such as for batches of graphs; names and arguments are torch's.

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_ids: Sequence[torch.device]
    ) -> tuple[list[Any], list[Any]]:
        """Return positional and keyword arguments for each replica."""
        shares = scatter((inputs, kwargs), device_ids, self.dim)
        return [args for args, _ in shares], [named for _, named in shares]

    def replicate(self, module: nn.Module, device_ids: Sequence[torch.device]) -> list[nn.Module]:
        """Return one replica per device."""
        return replicate(module, device_ids)

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of all replicas."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: torch.device) -> Any:
        """Return one output made of those of all replicas."""
        return gather(outputs, output_device, self.dim)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet, as when a copy is being made
                raise
            return getattr(self.module, name)

    def _check_home(self, module: nn.Module) -> None:
        home = self.device_ids[0]
        if all(x.device == home for x in [*module.parameters(), *module.buffers()]):
            return  # names take time
        for name, x in [*module.named_parameters(), *module.named_buffers()]:
            if x.device != home:
                msg = (
                    f"{name} is on {x.device}, but all parameters and buffers must be on "
                    f"{home}, the first of device_ids: call .to({str(home)!r})"
                )
                raise ConfigError(msg)

    def _total_loss(self, losses: Sequence[Any], shares: Sequence[Any]) -> torch.Tensor:
        """Return the loss of the batch from those of its shares, in their order."""
        odd = next(
            (x for x in losses if not (isinstance(x, torch.Tensor) and x.numel() == 1)), None
        )
        if odd is not None:
            got = f"shape {list(odd.shape)}" if isinstance(odd, torch.Tensor) else repr(odd)
            msg = (
                f"criterion must return one number per share, got {got}: pass reduction='none' "
                "to get it as it is"
            )
            raise ConfigError(msg)
        moved: list[torch.Tensor] = [x.reshape(()).to(self.output_device) for x in losses]
        if self.reduction == "mean" and len(moved) > 1:
            counts = [num_samples(share, self.dim) or 1 for share in shares]
            moved = [x * (n / sum(counts)) for x, n in zip(moved, counts, strict=True)]
        total = moved[0]
        for x in moved[1:]:
            total = total + x
        return total


class _WithCriterion(nn.Module):
    """A module and its criterion as one module that can be replicated.

    With `of_targets` it returns shares of a mean over targets.
    """

    def __init__(self, module: nn.Module, criterion: Any, *, of_targets: bool) -> None:
        super().__init__()
        self.module = module
        self.criterion = criterion
        self.of_targets = of_targets

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        *args, target = inputs
        output = self.module(*args, **kwargs)
        if self.of_targets:
            return share_of_mean(self.criterion, output, target)
        return self.criterion(output, target)


def _refuse_sync_batch_norm(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, SyncBatchNorm | nn.SyncBatchNorm):
            msg = (
                f"{name or 'the module'} is a SyncBatchNorm, but several replicas of one "
                "process are no ranks: use DistributedDataParallel, or BatchNorm"
            )
            raise ConfigError(msg)
