"""DataParallel: one process, several devices, one replica of the module on each.

The simplest way to use the GPUs of one machine: nothing to launch, no ranks. Each forward splits
the batch, copies the module to all devices, runs the replicas in threads and gathers their outputs
on one device. Backward sums the replicas' gradients there. The price: the module is copied in every
step, and all replicas share Python's interpreter lock. The first device holds the outputs of the
whole batch and computes the whole loss, so it runs out of memory first.

With `criterion` the last problem is avoided: every replica computes the loss of its share of the
targets on its device, and only losses are gathered.

    DataParallel(model)(x)                    outputs of the whole batch on the first device
    DataParallel(model, criterion=F.cross_entropy)(x, target=y)
                                              the loss of the whole batch, nothing else

Source: torch's DataParallel (`torch/nn/parallel/data_parallel.py`), with the same signature,
attributes and overridable steps. Differences: works on the CPU; sums gradients in the order of
replicas; shares differ by one sample at most; attributes assigned in replica 0's forward survive;
no warning if replicas return scalars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
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

__all__ = ["DataParallel", "data_parallel"]

REDUCTIONS = ("mean", "sum", "none")


class DataParallel(nn.Module):
    """Module wrapper with forwards that use several devices.

    Attributes of the module can be read from the wrapper.

    Args:
        module: Module; moved to the first device.
        device_ids: Devices; by default all GPUs, or the module's device if there are none. A device
            may occur several times.
        output_device: Device of outputs, by default the first one; -1 is the CPU.
        dim: Dim of samples in inputs and outputs.
        criterion: Function `criterion(output, target)`, which every replica calls with its share
            in forwards with a `target=` argument. Other forwards return outputs, as in evaluation.
            If it is a module, it is replicated with the wrapped module.
        reduction: Reduction of the criterion: `mean` over samples, `sum`, or `none`, which returns
            the results of the replicas' criteria like outputs. By default the criterion's attribute
            or argument of this name, also if a `functools.partial` binds it. A criterion without
            one, such as a lambda, is assumed to be a mean over samples; pass `reduction` if it is
            not. torch's cross entropies (`CrossEntropyLoss`, `NLLLoss` and their functions) may
            have class weights and ignored targets (`ignore_index`). For other weighted means, such
            as in a lambda, use the sum, and divide by the weights or the number of targets.
    Returns (of forward):
        Outputs of all replicas, concatenated. Tensors without dims, such as losses that the module
        computes itself, become a vector with one element per replica: take `.sum()` of sums; a mean
        of means weighs samples unequally if shares differ in size. With `target`: one loss, equal
        to the loss of the whole batch up to the order of sums.

    Raises:
        ConfigError: A device does not exist, the module is on another device, tensors of the batch
            disagree in size, or the criterion weighs or ignores samples in an unknown way; with
            several devices, SyncBatchNorm or a compiled module inside.

    Determinism:
        Outputs and gradients are bitwise equal to a loop over the shares that sums gradients in the
        order of replicas, if kernels are deterministic. Random numbers of replicas on the same
        device are not deterministic.

    Cost:
        Per step 2 l bytes to and from each additional device, l = bytes of the parameters, in
        addition to inputs and outputs.
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
        # a single replica is the module itself, so all changes in its forward persist
        replicas = [called] if len(used) == 1 else self.replicate(called, used)
        outputs = self.parallel_apply(replicas, shares, options)
        if len(used) > 1:
            write_back(called, replicas[0])
        if of_targets:
            return mean_of(outputs, self.output_device)
        if with_criterion and self.reduction != "none":
            return self._total_loss(outputs, [*zip(shares, options, strict=True)])
        return self.gather(outputs, self.output_device)

    # Steps that subclasses override, for example for batches of graphs, as in torch.

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_ids: Sequence[torch.device]
    ) -> tuple[list[Any], list[Any]]:
        """Split a batch into positional and keyword arguments for each replica.

        Args:
            inputs: Positional arguments of `forward`.
            kwargs: Keyword arguments of `forward`, by name.
            device_ids: Device of each replica.
        """
        shares = scatter((inputs, kwargs), device_ids, self.dim)
        return [args for args, _ in shares], [named for _, named in shares]

    def replicate(self, module: nn.Module, device_ids: Sequence[torch.device]) -> list[nn.Module]:
        """Return one replica per device."""
        return replicate(module, device_ids)

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Run each replica on its entry of `inputs` and `kwargs`, and return all outputs."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: torch.device) -> Any:
        """Return the outputs of all replicas combined to one."""
        return gather(outputs, output_device, self.dim)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet, for example during a copy
                raise
            return getattr(self.module, name)

    def _check_home(self, module: nn.Module) -> None:
        home = self.device_ids[0]
        if all(x.device == home for x in [*module.parameters(), *module.buffers()]):
            return  # named_parameters takes longer
        for name, x in [*module.named_parameters(), *module.named_buffers()]:
            if x.device != home:
                msg = (
                    f"{name} is on {x.device}, but all parameters and buffers must be on "
                    f"{home}, the first of device_ids: call .to({str(home)!r})"
                )
                raise ConfigError(msg)

    def _total_loss(self, losses: Sequence[Any], shares: Sequence[Any]) -> torch.Tensor:
        """Return the loss of the batch, computed from the losses of its shares in order."""
        odd = next(
            (x for x in losses if not (isinstance(x, torch.Tensor) and x.numel() == 1)), None
        )
        if odd is not None:
            got = f"shape {list(odd.shape)}" if isinstance(odd, torch.Tensor) else repr(odd)
            msg = (
                f"criterion must return one number per share, got {got}: pass reduction='none' "
                "to get the results unchanged"
            )
            raise ConfigError(msg)
        moved: list[torch.Tensor] = [x.reshape(()).to(self.output_device) for x in losses]
        if self.reduction == "mean" and len(moved) > 1:
            counts = [num_samples(share, self.dim) or 1 for share in shares]
            moved = [x * (n / sum(counts)) for x, n in zip(moved, counts, strict=True)]
        return reduce(torch.add, moved)


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceLike] | None = None,
    output_device: DeviceLike | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run one forward of `module` on several devices, without a wrapper.

    Args:
        module: Module; moved to the first device.
        inputs: Positional arguments of the forward: a tuple, or one argument; None if there are
            none.
        device_ids: See `DataParallel`.
        output_device: See `DataParallel`.
        dim: See `DataParallel`.
        module_kwargs: Keyword arguments of the forward.

    Raises:
        ConfigError: See `DataParallel`.

    Source: torch's `torch.nn.parallel.data_parallel`, with the same signature.
    """
    arguments = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    wrapper = DataParallel(module, device_ids, output_device, dim)
    return wrapper(*arguments, **(module_kwargs or {}))


class _WithCriterion(nn.Module):
    """Module and criterion as one module that can be replicated.

    With `of_targets` it returns contributions to a mean over targets.
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
                f"{name or 'the module'} is a SyncBatchNorm, which cannot average over replicas "
                "of one process: use DistributedDataParallel, or BatchNorm"
            )
            raise ConfigError(msg)
