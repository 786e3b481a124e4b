"""BatchNorm with running statistics of the whole batch instead of its micro-batches.

Micro-batches are normalized by their own mean and variance, as usual. But running statistics that
are updated per micro-batch decay faster, and use the variance of fewer samples. Here sums are kept
over the micro-batches, and the running statistics are updated once at the end of the batch.

Source: C. Kim et al., torchgpipe (2020), section 3.4.
"""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import nn
from torch.nn import functional

from braid.parallel.pipeline.recomputing import is_recomputing
from braid.runtime.torch_internals import BatchNorm, own_modules

__all__ = ["DeferredBatchNorm", "commit_batch_norms"]

Module = TypeVar("Module", bound=nn.Module)


class DeferredBatchNorm(BatchNorm):
    """BatchNorm for pipelines, with any number of dims.

    Args:
        num_features: Number of channels (dim 1).
        eps: Number added to the variance.
        momentum: Weight of a batch in the running statistics; None for their mean.
        affine: Whether the layer has a weight and a bias.
        chunks: Number of micro-batches after which the layer updates its running statistics; None
            to call `commit`.

    Attributes:
        num_tracked: Number of micro-batches since the last commit.
    """

    _sum: torch.Tensor
    _sum_of_squares: torch.Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int | None = 1,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.chunks = chunks
        self.num_tracked = 0
        self._num_rows = 0
        for name in ("_sum", "_sum_of_squares"):
            zeros = torch.zeros(num_features, dtype=torch.float64)
            self.register_buffer(name, zeros, persistent=False)

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            msg = f"dim 1 of shape {list(x.shape)} must have {self.num_features} channels"
            raise ValueError(msg)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize by the micro-batch's statistics, and add the micro-batch to the sums."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        if torch.is_grad_enabled() and not is_recomputing():
            self._track(x.detach())
        return functional.batch_norm(
            x, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps
        )

    @torch.no_grad()
    def _track(self, x: torch.Tensor) -> None:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.double()
        self._sum += wide.sum(dims)
        self._sum_of_squares += wide.square().sum(dims)
        self._num_rows += x.numel() // max(1, x.shape[1])
        self.num_tracked += 1
        if self.num_tracked == self.chunks:
            self.commit()

    @torch.no_grad()
    def commit(self) -> None:
        """Update the running statistics by the micro-batches since the last commit."""
        if not self.num_tracked:
            return
        rows = self._num_rows
        mean = self._sum / rows
        variance = (self._sum_of_squares / rows - mean.square()) * rows / max(1, rows - 1)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        weight = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(value.to(running.dtype), weight)
        self._sum.zero_()
        self._sum_of_squares.zero_()
        self.num_tracked = self._num_rows = 0

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int | None = 1) -> Module:
        """Return a module with every BatchNorm that tracks statistics converted to this class.

        Parameters and running statistics stay the same tensors; modules without BatchNorm stay
        the same objects.

        Args:
            module: Module to convert.
            chunks: See the class.
        """
        if isinstance(module, DeferredBatchNorm) and module.chunks == chunks:
            return module
        new: nn.Module = module
        if isinstance(module, BatchNorm) and module.running_mean is not None:
            new = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
            new.to(module.running_mean.device)
            new.train(module.training)
            for name in ("weight", "bias"):
                setattr(new, name, getattr(module, name))
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                new.register_buffer(name, getattr(module, name))
        for name, child in own_modules(module).items():
            if child is not None:
                new.add_module(name, cls.convert_deferred_batch_norm(child, chunks))
        return cast("Module", new)


def commit_batch_norms(module: nn.Module) -> None:
    """Commit every deferred BatchNorm in a module."""
    for part in module.modules():
        if isinstance(part, DeferredBatchNorm):
            part.commit()
