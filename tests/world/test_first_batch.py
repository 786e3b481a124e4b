"""Two mistakes of the first batch are one line of the log, on rank 0: the same batch, unequal shares."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from training import batch, linear

from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel
from braid.parallel.gradients.first_batch import same_batch, unequal_rows
from braid.parallel.sharding import FullyShardedDataParallel, fully_shard, shard_optimizer
from support.worlds import run_threads

LOGGER = "braid.parallel.gradients.first_batch"


class Lines(logging.Handler):
    """Texts of a logger; ranks on threads share it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.fixture
def logged():
    lines = Lines()
    logging.getLogger(LOGGER).addHandler(lines)
    yield lines.texts
    logging.getLogger(LOGGER).removeHandler(lines)


def _train(
    group: Group, share: Callable[[Group, int], torch.Tensor], weights: bool = False
) -> None:
    model = DistributedDataParallel(linear(4, 2), process_group=group)
    for step in range(3):
        x = share(group, step)
        if weights:
            model.set_loss_weight(len(x))
        model(x).square().mean().backward()


def _train_sharded(group: Group, share: Callable[[Group, int], torch.Tensor], engine: str) -> None:
    model, call = linear(4, 2), None
    if engine == "FSDP":
        call = FullyShardedDataParallel(model, group)
    elif engine == "fully_shard":
        call = fully_shard(model, process_group=group)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = model
        kept = shard_optimizer(optimizer, model, process_group=group, stage=int(engine))
        assert kept.model is model
    with torch.no_grad():
        call(batch(0, 0))
    for step in range(2):
        call(share(group, step)).square().mean().backward()


def _own(group: Group, step: int) -> torch.Tensor:
    return batch(group.rank, step)


def _same(_group: Group, step: int) -> torch.Tensor:
    return batch(0, step)


def _unequal(group: Group, step: int) -> torch.Tensor:
    return batch(group.rank, step, rows=3 + (group.rank == 1))


@pytest.mark.parametrize("engine", ["1", "2", "3", "FSDP", "fully_shard"])
@pytest.mark.parametrize(
    ("share", "text"),
    [(_own, None), (_same, "every rank seems to compute the same batch"), (_unequal, "weigh more")],
)
def test_sharded_models_have_the_same_checks(logged, engine, share, text):
    run_threads(2, _train_sharded, share, engine)
    assert len(logged) == (text is not None)
    assert (text or "") in "".join(logged)
    assert "set_loss_weight" not in "".join(logged)


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_batch_on_all_ranks_is_one_line(logged, size):
    run_threads(size, _train, _same)
    (text,) = logged
    assert text == (
        f"braid: the first inputs of Linear are equal bit by bit on all {size} ranks, and so are the "
        "sums of the first gradients: every rank seems to compute the same batch. Give each rank a "
        "different part, such as batch[group.rank :: group.size] or a DistributedSampler"
    )


def test_unequal_shares_are_one_line_unless_they_are_weighted(logged):
    run_threads(3, _train, _unequal)
    (text,) = logged
    assert (
        "dim 0 of the first inputs of Linear differs among ranks (3 on rank 0, 4 on rank 1, "
        in text
    )
    assert "If dim 0 is the batch, samples of small batches weigh more" in text
    assert "call set_loss_weight(num_rows)" in text
    run_threads(3, _train, _unequal, True)
    assert len(logged) == 1


@pytest.mark.parametrize(("size", "share"), [(1, _same), (2, _own), (3, _own)])
def test_shares_of_one_batch_and_one_rank_are_no_mistake(logged, size, share):
    run_threads(size, _train, share)
    assert logged == []


def _opposite(group: Group, step: int) -> torch.Tensor:
    """Other samples, with the same gradients of a square."""
    return batch(0, step) * (1 - 2 * group.rank)


@pytest.mark.parametrize("factor", [0.0, torch.nan])
def test_gradients_of_zero_and_nan_on_all_ranks_prove_nothing(logged, factor):
    def train(group: Group) -> None:
        model = DistributedDataParallel(linear(4, 2), process_group=group, nonfinite="ignore")
        (model(_same(group, 0)).square().mean() * factor).backward()

    run_threads(2, train)
    assert logged == []


def test_equal_gradients_of_other_samples_are_no_mistake(logged):
    def train(group: Group) -> None:
        net = linear(4, 2)
        torch.nn.init.zeros_(net.bias)
        net.bias.requires_grad_(False)
        model = DistributedDataParallel(net, process_group=group)
        model(_opposite(group, 0)).square().mean().backward()

    run_threads(2, train)
    assert logged == []


class Recurrent(torch.nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.cells = torch.nn.RNN(4, 3, batch_first=batch_first)

    def forward(self, x: torch.Tensor, _lengths: torch.Tensor | None = None) -> torch.Tensor:
        return self.cells(x)[0].mean()


@pytest.mark.parametrize(
    ("batch_first", "with_lengths", "num_lines"),
    [(True, False, 1), (False, False, 0), (True, True, 0)],
)
def test_inputs_whose_first_dim_may_be_time_are_no_shares(
    logged, batch_first, with_lengths, num_lines
):
    net = Recurrent(batch_first)

    def train(group: Group) -> None:
        model = DistributedDataParallel(copy.deepcopy(net), process_group=group)
        x = torch.randn(5 + group.rank, 2, 4, generator=torch.Generator().manual_seed(group.rank))
        model(x, torch.tensor([5, 4]) if with_lengths else None).backward()

    run_threads(2, train)
    assert len(logged) == num_lines


def test_what_is_unknown_of_a_rank_proves_nothing():
    assert same_batch("M", [0, 0]) is None
    assert same_batch("M", [5, 6]) is None
    assert unequal_rows("M", [0, 1], [0, 5]) is None
