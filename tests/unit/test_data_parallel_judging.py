"""The loss of shares is the loss of the batch, whatever the criterion's mean divides by."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.errors import ConfigError
from braid.parallel.data_parallel.replicas.data_parallel import DataParallel
from braid.parallel.data_parallel.replicas.loss import reduction_of

CLASSES = 4
WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.5])
TARGET = torch.tensor([1, -100, 0, 3, -100, 1, 2])  # shares of 3, 2 and 2
ONE_LEFT_OUT = torch.tensor([1, 2, 0, -100, -100, 1, 3])  # nothing counts in the second share
WEIGHED_ZERO = torch.tensor([1, 3, 0, 2, 2, 1, 3])  # WEIGHT takes away the second share


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _module(*, logs: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch_state = torch.Generator().manual_seed(4)
    module = nn.Sequential(nn.Linear(5, CLASSES), nn.LogSoftmax(1) if logs else nn.Identity())
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=torch_state))
    return module.to(dtype)


def _of_batch(criterion, target, *, logs=False, x=None):
    """Loss and gradients of one process."""
    module = _module(logs=logs)
    loss = criterion(module(_x(len(target), 5) if x is None else x), target)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters())]


def _of_shares(criterion, target, *, logs=False, x=None, count=3):
    module = _module(logs=logs)
    wrapped = DataParallel(module, ["cpu"] * count, criterion=criterion)
    loss = wrapped(_x(len(target), 5) if x is None else x, target=target)
    loss.backward()
    return [loss.detach(), *(p.grad for p in module.parameters())]


CRITERIA = {
    "module": (nn.CrossEntropyLoss(), False),
    "weighted module": (nn.CrossEntropyLoss(weight=WEIGHT), False),
    "other ignored": (nn.CrossEntropyLoss(ignore_index=1), False),
    "smooth": (nn.CrossEntropyLoss(label_smoothing=0.2), False),
    "smooth and weighted": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), False),
    "nll": (nn.NLLLoss(weight=WEIGHT), True),
    "function": (functional.cross_entropy, False),
    "nll function": (functional.nll_loss, True),
    "weighted partial": (functools.partial(functional.cross_entropy, weight=WEIGHT), False),
    "weighted nll partial": (functools.partial(functional.nll_loss, weight=WEIGHT), True),
    "partial of partial": (
        functools.partial(functools.partial(functional.cross_entropy, ignore_index=0), weight=WEIGHT),
        False,
    ),
    "sum in a partial": (functools.partial(functional.cross_entropy, reduction="sum"), False),
    "sum in an nll partial": (functools.partial(functional.nll_loss, reduction="sum"), True),
    "partial of a module": (functools.partial(nn.CrossEntropyLoss(weight=WEIGHT)), False),
}  # fmt: skip


@pytest.mark.parametrize("target", [TARGET, ONE_LEFT_OUT, WEIGHED_ZERO], ids=["mixed", "one left out", "weighed zero"])  # fmt: skip
@pytest.mark.parametrize(("criterion", "logs"), CRITERIA.values(), ids=CRITERIA)
def test_loss_and_gradients_are_those_of_the_batch(criterion, logs, target):
    if getattr(criterion, "ignore_index", None) == 1 or "ignore_index" in getattr(
        criterion, "keywords", {}
    ):
        target = target.clamp(min=0)  # -100 is no class then
    torch.testing.assert_close(
        _of_shares(criterion, target, logs=logs), _of_batch(criterion, target, logs=logs)
    )


def test_one_replica_returns_what_the_criterion_returns():
    for criterion in (nn.CrossEntropyLoss(weight=WEIGHT), functional.cross_entropy):
        ours = _of_shares(criterion, TARGET, count=1)
        assert all(map(torch.equal, ours, _of_batch(criterion, TARGET)))


def test_compiled_criteria_are_known_by_what_was_compiled():
    module = torch.compile(nn.CrossEntropyLoss(weight=WEIGHT), backend="eager")
    wrapped = DataParallel(nn.Identity(), ["cpu"], criterion=module)
    x = _x(7, CLASSES)
    torch.testing.assert_close(wrapped(x, target=TARGET), module(x, TARGET))
    function = functools.partial(
        torch.compile(functional.cross_entropy, backend="eager"), weight=WEIGHT
    )
    shares = DataParallel(nn.Identity(), ["cpu"] * 3, criterion=function)
    torch.testing.assert_close(shares(x, target=TARGET), module(x, TARGET))


def test_a_batch_without_targets_that_count_has_no_mean():
    target = torch.full((6,), -100)
    loss, *grads = _of_shares(nn.CrossEntropyLoss(), target)
    assert torch.isnan(loss)
    torch.testing.assert_close(grads, _of_batch(nn.CrossEntropyLoss(), target)[1:])


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(weight=WEIGHT), nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)])  # fmt: skip
def test_targets_of_probabilities_count_alike(criterion):
    target = _x(7, CLASSES).softmax(1)
    torch.testing.assert_close(_of_shares(criterion, target), _of_batch(criterion, target))


def test_targets_with_further_dims_are_counted_one_by_one():
    pixels = torch.randint(0, CLASSES, (5, 2, 3), generator=torch.Generator().manual_seed(1))
    pixels[0] = pixels[3, 0] = -100
    x = _x(5, CLASSES, 2, 3)
    for criterion in (nn.CrossEntropyLoss(weight=WEIGHT), functional.cross_entropy):
        wrapped = DataParallel(nn.Identity(), ["cpu"] * 2, criterion=criterion)
        torch.testing.assert_close(wrapped(x, target=pixels), criterion(x, pixels))


def test_targets_of_bytes_are_counted():
    target = torch.tensor([1, 0, 3, 3, 1, 2, 2], dtype=torch.uint8)
    criterion = functools.partial(functional.cross_entropy, weight=WEIGHT)
    torch.testing.assert_close(_of_shares(criterion, target), _of_batch(criterion, target))


def test_a_mean_of_16_bits_stays_finite_where_the_sum_is_not():
    x = torch.zeros(6, CLASSES, dtype=torch.float16)
    x[:, 0] = 30000.0
    target = torch.tensor([1, 2, 3, 1, -100, 1])
    expected = functional.cross_entropy(x.float(), target).half()
    assert torch.isfinite(expected)
    found = DataParallel(nn.Identity(), ["cpu"] * 2, criterion=nn.CrossEntropyLoss())(
        x, target=target
    )
    assert torch.equal(found, expected)
    assert found.dtype == torch.float16


def test_a_criterion_keeps_its_reduction_and_its_hooks():
    criterion, seen = nn.CrossEntropyLoss(), []
    criterion.register_forward_hook(lambda *_: seen.append(1))
    _of_shares(criterion, TARGET)
    assert (criterion.reduction, len(seen)) == ("mean", 3)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="not in this version of torch")  # fmt: skip
def test_a_criterion_with_a_layer_learns_what_it_learns_from_the_batch():
    grads = []
    for count in (1, 3):
        torch_state = torch.Generator().manual_seed(4)
        criterion = nn.LinearCrossEntropyLoss(5, CLASSES)
        with torch.no_grad():
            for p in criterion.parameters():
                p.copy_(torch.randn(p.shape, generator=torch_state))
        wrapped = DataParallel(nn.Identity(), ["cpu"] * count, criterion=criterion)
        loss = wrapped(_x(7, 5), target=TARGET)
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in criterion.parameters())])
    torch.testing.assert_close(*grads)


BCE = functional.binary_cross_entropy_with_logits


@pytest.mark.parametrize(
    "criterion",
    [nn.BCEWithLogitsLoss(weight=WEIGHT), functools.partial(BCE, weight=WEIGHT), nn.MultiLabelSoftMarginLoss(weight=WEIGHT)],
)  # fmt: skip
def test_weights_that_means_do_not_divide_by_are_right(criterion):
    target = _x(7, CLASSES).gt(0).float()
    torch.testing.assert_close(_of_shares(criterion, target), _of_batch(criterion, target))


class Flattening(nn.CrossEntropyLoss):
    """A forward of its own."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output.flatten(0, -2), target.flatten())


def _focal(output, target, weight=None, ignore_index=-100, reduction="sum"):
    return output.sum()


@pytest.mark.parametrize(
    ("criterion", "reduction", "words"),
    [
        (Flattening(WEIGHT), None, "Flattening has class weights"),
        (Flattening(WEIGHT), "mean", "Flattening has class weights"),
        (functools.partial(_focal, weight=WEIGHT), "mean", "_focal has class weights"),
        (Flattening(), None, "Flattening leaves out targets of ignore_index=-100, .* pass reduction='sum' .* or pass reduction='mean'"),
        (functools.partial(_focal, ignore_index=0, reduction="mean"), None, "_focal leaves out targets of ignore_index=0"),
    ],
)  # fmt: skip
def test_other_means_that_may_weigh_samples_are_refused(criterion, reduction, words):
    with pytest.raises(ConfigError, match=words):
        DataParallel(nn.Identity(), ["cpu"], criterion=criterion, reduction=reduction)


def test_a_mean_without_ignored_targets_can_be_told():
    x, target = _x(5, 2, CLASSES), torch.zeros(5, 2, dtype=torch.int64)
    wrapped = DataParallel(nn.Identity(), ["cpu"] * 2, criterion=Flattening(), reduction="mean")
    torch.testing.assert_close(wrapped(x, target=target), Flattening()(x, target))


class Summing:
    """Not a function."""

    reduction = "sum"


PARTIAL = functools.partial(functional.mse_loss, reduction="sum")


@pytest.mark.parametrize(
    ("criterion", "expected"),
    [
        (None, "mean"),
        (lambda y, t: (y - t).sum(), "mean"),
        (functional.mse_loss, "mean"),
        (_focal, "sum"),
        (PARTIAL, "sum"),
        (functools.partial(PARTIAL, reduction="none"), "none"),
        (functools.partial(functional.mse_loss, size_average=False), "sum"),
        (functools.partial(functional.mse_loss, reduce=False), "none"),
        (functools.partial(functional.mse_loss, reduce=True), "mean"),
        (functools.partial(nn.MSELoss(reduction="sum")), "sum"),
        (nn.KLDivLoss(reduction="batchmean"), "mean"),
        (functools.partial(functional.kl_div, reduction="batchmean"), "mean"),
        (Summing(), "sum"),
        (max, "mean"),
    ],
)
def test_how_a_criterion_reduces_is_read_where_it_says_so(criterion, expected):
    assert reduction_of(criterion) == expected
