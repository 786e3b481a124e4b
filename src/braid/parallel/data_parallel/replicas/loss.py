"""The loss of a batch, computed from the losses of its shares.

Sums of shares add up to the sum of the batch; means over samples must be weighted by the sizes of
shares. But torch's cross entropies compute the mean over targets: without ignored targets
(`ignore_index`), and weighted by class. With sum S_r of the losses of share r and sum C_r of the
weights of its targets, the batch's mean is

    (S_0 + S_1 + ...) / (C_0 + C_1 + ...)

also if a share has ignored targets only, with the undefined mean S_r / C_r = 0 / 0.

The reduction of a criterion is read where torch keeps it: attributes of a module, keyword arguments
of a `functools.partial`, the default of a function's argument.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from braid.errors import ConfigError
from braid.parallel.data_parallel.replicas.replicate import COMPILED_FROM

__all__ = ["check_criterion", "is_mean_of_targets", "mean_of", "reduction_of", "share_of_mean"]

IGNORED = -100  # torch's default
INLINED = "torch._dynamo.external_utils"  # around torch's own functions when they are compiled
HALVES = frozenset({torch.float16, torch.bfloat16})

# criteria that divide by the weights of targets; modules by their forward, as subclasses may have
# another one
OF_TARGETS = (
    functional.cross_entropy,
    functional.nll_loss,
    nn.CrossEntropyLoss.forward,
    nn.NLLLoss.forward,
    # not in all versions of torch
    getattr(nn, "LinearCrossEntropyLoss", nn.CrossEntropyLoss).forward,
)

# criteria that multiply by `weight`, but divide by the number of samples or elements
OF_SAMPLES = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.multi_margin_loss,
    functional.multilabel_soft_margin_loss,
    nn.BCELoss.forward,
    nn.BCEWithLogitsLoss.forward,
    nn.MultiMarginLoss.forward,
    nn.MultiLabelSoftMarginLoss.forward,
)


class ShareOfMean(NamedTuple):
    """Contribution of one share to a mean over targets.

    Attributes:
        total: Sum of losses, at least in float32, because a sum in 16 bits may overflow.
        divisor: Sum of the weights of targets.
        dtype: Dtype of the loss.
    """

    total: torch.Tensor
    divisor: torch.Tensor
    dtype: torch.dtype


def reduction_of(criterion: Any) -> str:
    """Return the name of a criterion's reduction; "mean" if it has none.

    Args:
        criterion: Module, function, partial of one of these, or None.
    """
    called, options = _called(criterion)
    average, reduces = options.get("size_average"), options.get("reduce")  # older names
    if average is not None or reduces is not None:
        return "none" if reduces is False else "sum" if average is False else "mean"
    reduction = _option(criterion, "reduction")
    if reduction is None and isinstance(called, FunctionType):
        argument = inspect.signature(called).parameters.get("reduction")
        reduction = None if argument is None else argument.default
    if reduction is None or reduction is inspect.Parameter.empty:
        return "mean"
    return "mean" if reduction == "batchmean" else str(reduction)  # a mean over samples


def is_mean_of_targets(criterion: Any) -> bool:
    """Return whether the criterion is a torch criterion with a weighted mean over targets."""
    return _is_one_of(criterion, OF_TARGETS) and reduction_of(criterion) == "mean"


def check_criterion(criterion: Any, *, stated: bool) -> None:
    """Raise if the criterion's mean may not be a mean over samples.

    torch's criteria with a weighted mean over targets are allowed.

    Args:
        criterion: Criterion; the losses of its shares are to be averaged.
        stated: Whether the caller has passed the reduction "mean".

    Raises:
        ConfigError: The criterion weighs samples, or may ignore some.
    """
    if _is_one_of(criterion, OF_TARGETS):
        return
    called, _ = _called(criterion)
    name = getattr(called, "__name__", type(called).__name__)
    if _option(criterion, "weight") is not None and not _is_one_of(criterion, OF_SAMPLES):
        msg = (
            f"{name} has class weights, so the means of the replicas' batches do not give the "
            "mean of the batch: use reduction='sum' and divide by the sum of the targets' weights"
        )
        raise ConfigError(msg)
    ignored = _option(criterion, "ignore_index")
    if ignored is not None and not stated:
        msg = (
            f"{name} leaves out targets of ignore_index={ignored}, so its mean is not over "
            "samples, and the means of shares do not give the mean of the batch: use a sum, pass "
            "reduction='sum' and divide by the number of targets that are not ignored, or "
            "pass reduction='mean' if there never are such targets"
        )
        raise ConfigError(msg)


def share_of_mean(criterion: Any, output: torch.Tensor, target: torch.Tensor) -> ShareOfMean:
    """Compute the contribution of one share of the batch to a mean over targets.

    Args:
        criterion: Criterion for which `is_mean_of_targets` is true.
        output: Output of the share.
        target: Class indices, or a probability for each class.
    """
    losses = _unreduced(criterion)(output, target)
    total = losses.sum(dtype=_wide(losses.dtype))
    if target.is_floating_point():  # targets with probabilities all have weight 1
        divisor = torch.full((), losses.numel(), device=losses.device)
        return ShareOfMean(total, divisor, losses.dtype)
    target = target.long()
    ignored, weight = _option(criterion, "ignore_index"), _option(criterion, "weight")
    counted = target != (IGNORED if ignored is None else ignored)
    if weight is None:
        return ShareOfMean(total, counted.sum(), losses.dtype)
    weights = weight.detach()[target.masked_fill(~counted, 0)] * counted
    return ShareOfMean(total, weights.sum(dtype=_wide(weights.dtype)), losses.dtype)


def mean_of(shares: Sequence[ShareOfMean], device: torch.device) -> torch.Tensor:
    """Return the loss of the batch, summed in the order of shares; differentiable.

    Args:
        shares: All shares of the batch.
        device: Device of the loss.
    """
    total, divisor = shares[0].total.to(device), shares[0].divisor.to(device)
    for share in shares[1:]:
        total, divisor = total + share.total.to(device), divisor + share.divisor.to(device)
    return (total / divisor).to(shares[0].dtype)


def _called(criterion: Any) -> tuple[Any, dict[str, Any]]:
    """Return the innermost callable, and the keyword arguments bound to it."""
    options: dict[str, Any] = {}
    while True:
        if isinstance(criterion, functools.partial):
            options = {**criterion.keywords, **options}
            criterion = criterion.func
        elif isinstance(criterion, FunctionType) and COMPILED_FROM in vars(criterion):
            criterion = vars(criterion)[COMPILED_FROM]
        elif (
            isinstance(criterion, FunctionType) and criterion.__globals__.get("__name__") == INLINED
        ):
            criterion = vars(criterion)["__wrapped__"]
        elif isinstance(criterion, nn.Module) and "_orig_mod" in dict(criterion.named_children()):
            criterion = criterion.get_submodule("_orig_mod")  # of torch.compile
        else:
            return criterion, options


def _option(criterion: Any, name: str) -> Any:
    """Return a keyword argument or attribute of a criterion; None if it does not exist."""
    called, options = _called(criterion)
    return options[name] if name in options else getattr(called, name, None)


def _is_one_of(criterion: Any, functions: Sequence[Callable[..., Any]]) -> bool:
    called, _ = _called(criterion)
    if isinstance(called, nn.Module):
        called = called.forward
        called = called.__func__ if isinstance(called, MethodType) else None
    return any(called is function for function in functions)


def _unreduced(criterion: Any) -> Callable[..., torch.Tensor]:
    """Return the criterion with one loss per target instead of a reduction."""
    called, _ = _called(criterion)
    if isinstance(called, nn.Module):
        twin: Any = copy.copy(called)  # shares parameters, buffers and hooks
        twin.reduction = "none"
        return twin  # type: ignore[no-any-return]
    return functools.partial(criterion, size_average=None, reduce=None, reduction="none")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype
