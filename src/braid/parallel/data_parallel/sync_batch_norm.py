"""SyncBatchNorm: batch normalization with the statistics of all ranks' batches.

Problem: with a small batch per rank, mean and variance per rank are poor estimates, and n ranks
compute another result than one process. torch's layer of this name requires a GPU, sends 1/std,
which cannot be added exactly, and needs fused kernels.

Idea: each rank sends count n_r, mean m_r and sum of squared deviations M_r of its batch. Every rank
combines them in the same order:

    n = sum n_r
    m = sum n_r m_r / n
    M = sum M_r + sum n_r (m_r - m)^2
    variance = M / n

which never subtracts large squares from each other. With x^ = (x - m) / sqrt(variance + eps),
y = w x^ + b, and sums over all ranks' samples, the gradient is

    dx = w / sqrt(variance + eps) (dy - sum(dy) / n - x^ sum(dy x^) / n)

so backward sends two numbers per channel. Gradients of w and b cover this rank's batch only; they
are averaged with the other gradients.

Source: Ioffe and Szegedy, "Batch Normalization", 2015; Chan, Golub, LeVeque, "Updating Formulae and
a Pairwise Algorithm for Computing Sample Variances", 1979; Peng et al., "MegDet", 2018 (batch
statistics across devices).
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from braid.comm import Group
from braid.errors import ConfigError
from braid.parallel.gradients.process_groups import group_of
from braid.runtime.torch_internals import BatchNorm, LazyNorm, disable_dynamo, own_modules

__all__ = ["SyncBatchNorm"]

# Shapes: x, y, dy, dx (N, C, ...); all else (C,), or (ranks, C) where rows are ranks


class Moments(NamedTuple):
    """Statistics of all ranks' batches.

    Attributes:
        mean: Mean per channel.
        variance: Variance per channel, biased: divided by the count.
        num_values: Number of values per channel.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    num_values: int


class _Batch(NamedTuple):
    """Values that forward keeps for backward in addition to saved tensors."""

    moments: Moments
    eps: float
    group: Group


class SyncBatchNorm(BatchNorm):
    """Batch normalization over the batches of all ranks of a group, on any device.

    In training all ranks must call it the same number of times, and run backward through it the
    same number of times. The inputs of all ranks require a gradient, or none does. Batches may
    differ in size or be empty. In evaluation it is an ordinary batch normalization. Parameters and
    buffers have the names of torch's layers.

    Args:
        num_features: Number of channels C.
        eps: Number added to the variance.
        momentum: Weight of a new batch in the running statistics; None for the mean over all
            batches so far.
        affine: Whether there are a weight and a bias per channel.
        track_running_stats: Whether to keep running statistics; without them, evaluation uses the
            statistics of its batch.
        process_group: Ranks that share statistics, such as `braid.init()`.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
        bias: Whether an affine layer has a bias besides its weight.

    Shape:
        x: (N, C, ...), and the same for the result.

    Raises:
        ConfigError: A group is missing; x has another number of channels; or all ranks together
            have a single value per channel (raised on all ranks).

    Cost:
        Training: one all_gather of 2 C + 2 numbers per forward, and one all_reduce of 2 C numbers
        per backward in which x has a gradient. 16-bit inputs have statistics in float32.

    Not twice differentiable: a second derivative raises ConfigError.
    """

    def __init__(  # noqa: PLR0917 - torch's signature
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if affine and not bias:
            self.register_parameter("bias", None)
        self.process_group: Group | None = group_of(process_group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `x` by the statistics of all ranks' batches."""
        self._check(x)
        if not self.training:
            use_batch = self.running_mean is None  # then there is nothing but this batch
            return functional.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                use_batch,
                0.0,
                self.eps,
            )
        return self._over_ranks(x)

    @disable_dynamo  # collectives cannot be part of a compiled graph
    def _over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        if self.process_group is None:  # the module was pickled
            self.process_group = group_of(None)
        group = self.process_group
        moments = _moments(x, group)
        if moments.num_values < 2:
            msg = (
                "SyncBatchNorm needs more than 1 value per channel when training, got "
                f"{moments.num_values} on ranks {list(group.ranks)} together "
                f"(input shape {list(x.shape)} on rank {group.context.rank}): "
                "leave the last, incomplete batch out, or call eval()"
            )
            raise ConfigError(msg)
        self._track(moments)
        y: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, _Batch(moments, self.eps, group)
        )
        return y

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Group | None = None
    ) -> nn.Module:
        """Replace all batch normalization layers in `module` by SyncBatchNorm.

        The new layers keep parameters, buffers, hooks and modes.

        Args:
            module: Module that is changed in place.
            process_group: Group of the new layers.

        Returns:
            The module, or its replacement if it is a batch normalization itself.

        Raises:
            ConfigError: A group is missing; a lazy layer has not been called yet; or a subclass
                overrides forward.
        """
        group = group_of(process_group)
        _check_convertible(module)
        converted: dict[int, nn.Module] = {}  # a shared layer stays shared
        for child in list(module.modules()):
            if isinstance(child, BatchNorm):
                converted_child = cls.__new__(cls)
                vars(converted_child).update(vars(child))
                vars(converted_child)["process_group"] = group
                converted[id(child)] = converted_child
        for parent in list(module.modules()):
            children = own_modules(parent)
            for name, original in children.items():
                children[name] = converted.get(id(original), original)
        return converted.get(id(module), module)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the group; a loaded layer uses torch's default group."""
        return {**vars(self), "process_group": None}

    def __copy__(self) -> SyncBatchNorm:
        twin = self.__class__.__new__(self.__class__)
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.process_group)] = self.process_group  # groups cannot be copied
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def _check(self, x: torch.Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            msg = f"the input has shape {list(x.shape)} instead of [N, {self.num_features}, ...]"
            raise ConfigError(msg)
        if not x.is_floating_point():
            msg = f"input of SyncBatchNorm must be floating-point, got {x.dtype}"
            raise ConfigError(msg)

    def _track(self, moments: Moments) -> None:
        """Update the running statistics by the statistics of a batch."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked.item())
        unbiased = moments.variance * (moments.num_values / (moments.num_values - 1))
        with torch.no_grad():
            for running, new in (
                (self.running_mean, moments.mean),
                (self.running_var, unbiased),
            ):
                running.mul_(1.0 - factor).add_(new.to(running.dtype), alpha=factor)


class _Normalise(torch.autograd.Function):
    """Autograd function x, weight, bias -> y; backward differentiates all ranks' moments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        batch: _Batch,
    ) -> torch.Tensor:
        mean, variance, _ = batch.moments
        ctx.save_for_backward(x, weight)
        ctx.batch = batch
        ctx.dtype_of_bias = None if bias is None else bias.dtype
        wide_weight, wide_bias = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        return functional.batch_norm(
            x, mean, variance, wide_weight, wide_bias, training=False, eps=batch.eps
        )

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            grads = _gradients(ctx, dy)
        if torch.is_grad_enabled():
            grads = tuple(None if g is None else _Once.apply(g, dy, x, weight) for g in grads)  # type: ignore[no-untyped-call]
        return *grads, None


class _Once(torch.autograd.Function):
    """Autograd function that returns a gradient and raises if it is differentiated."""

    @staticmethod
    # `of` makes autograd record these dependencies
    def forward(ctx: Any, grad: torch.Tensor, *of: Any) -> torch.Tensor:  # noqa: ARG004
        return grad.detach()

    @staticmethod
    # autograd never uses a result of it
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # noqa: ARG004
        msg = (
            "SyncBatchNorm does not support second derivatives, but its gradient was "
            "differentiated: use BatchNorm or GroupNorm where gradients are part of the loss"
        )
        raise ConfigError(msg)


def _moments(x: torch.Tensor, group: Group) -> Moments:
    """Return the moments of all ranks' batches, with the same bits on every rank."""
    channels = x.shape[1]
    with torch.no_grad():
        wide = _wide(x)
        count = x.numel() // channels
        # a rank without values contributes zeros
        mean = squares = wide.new_zeros(channels)
        if count:
            # two passes: as exact as torch.var_mean, which takes 15 times as long on the CPU
            dims = _all_but_channels(x)
            mean = wide.mean(dims)
            squares = (wide - _channels(mean, x)).square_().sum(dims)
        # as bits, since float32 cannot count beyond 2^24; first, so that the count stays aligned
        bits = torch.tensor([count], dtype=torch.int64, device=x.device).view(wide.dtype)
        row = torch.cat([bits, mean, squares])
        rows = group.all_gather(row).view(group.size, -1)
        counts = rows[:, : len(bits)].contiguous().view(torch.int64).flatten().tolist()
        means, deviations = torch.split(rows[:, len(bits) :], channels, dim=1)
        return _combined(counts, means, deviations)


def _combined(counts: list[int], means: torch.Tensor, squares: torch.Tensor) -> Moments:
    """Return the moments of the union of batches.

    Sums are of differences from the mean of one batch, which avoids cancellation for large means.
    """
    total = sum(counts)
    used = [rank for rank, count in enumerate(counts) if count]
    if not used:
        return Moments(means[0], squares[0], 0)
    first = means[used[0]]
    shares = means.new_tensor([counts[rank] / total for rank in used])[:, None]
    apart = means[used] - first
    shift = (shares * apart).sum(0)
    between = (shares * (apart - shift).square()).sum(0)
    return Moments(first + shift, squares[used].sum(0) / total + between, total)


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the required gradients of x, weight and bias; None for the others."""
    x, weight = ctx.saved_tensors
    mean, variance, num_values = ctx.batch.moments
    of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
    dims = _all_but_channels(x)
    scale = (variance + ctx.batch.eps).rsqrt()
    wide = _wide(dy)
    normal = (_wide(x) - _channels(mean, x)) * _channels(scale, x)
    sum_dy, sum_dy_normal = wide.sum(dims), (wide * normal).sum(dims)
    dx = None
    if of_x:
        sums = ctx.batch.group.all_reduce(torch.cat([sum_dy, sum_dy_normal]))
        sums = sums / num_values
        mean_dy, mean_dy_normal = sums.split(x.shape[1])
        factor = scale if weight is None else scale * weight
        dx = wide - _channels(mean_dy, x) - normal * _channels(mean_dy_normal, x)
        dx = (dx * _channels(factor, x)).to(x.dtype)
    return (
        dx,
        sum_dy_normal.to(weight.dtype) if of_weight else None,
        sum_dy.to(ctx.dtype_of_bias) if of_bias else None,
    )


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in {torch.float16, torch.bfloat16} else x


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return (C,) as a view (1, C, 1, ...) that broadcasts with x."""
    return values.view(1, -1, *(1,) * (x.dim() - 2))


def _check_convertible(module: nn.Module) -> None:
    forwards = {BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward}
    for name, child in module.named_modules():
        if isinstance(child, LazyNorm):
            msg = (
                f"{type(child).__name__} {name or 'itself'} has no number of channels yet: call "
                "the module once before conversion"
            )
            raise ConfigError(msg)
        if isinstance(child, BatchNorm) and type(child).forward not in forwards:
            msg = (
                f"{type(child).__name__} {name or 'itself'} overrides forward, which "
                "conversion to SyncBatchNorm would lose: replace it by hand"
            )
            raise ConfigError(msg)
