"""Two mistakes of the first batch are one line of the log, on rank 0: the same batch, unequal shares."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from training import batch, linear

from braid.comm import Group
from braid.data_parallel import DistributedDataParallel
from braid.data_parallel.ddp.first_batch import problems_of
from braid.testing.worlds import run_threads

LOGGER = "braid.data_parallel.ddp.first_batch"


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


def _own(group: Group, step: int) -> torch.Tensor:
    return batch(group.rank, step)


def _same(_group: Group, step: int) -> torch.Tensor:
    return batch(0, step)


def _unequal(group: Group, step: int) -> torch.Tensor:
    return batch(group.rank, step, rows=3 + (group.rank == 1))


def _zero(_group: Group, _step: int) -> torch.Tensor:
    return torch.zeros(3, 4)


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_batch_on_all_ranks_is_one_line(logged, size):
    run_threads(size, _train, _same)
    (text,) = logged
    assert text == (
        f"braid: the first gradients of Linear are equal bit by bit on all {size} ranks, so every "
        "rank computes the same batch: give each its share, such as "
        "batch[group.rank :: group.size] or a DistributedSampler"
    )


def test_unequal_shares_are_one_line_unless_they_are_weighted(logged):
    run_threads(3, _train, _unequal)
    (text,) = logged
    assert "unequal numbers of rows (3 on rank 0, 4 on rank 1, 3 on rank 2)" in text
    assert "call set_loss_weight(num_rows)" in text
    run_threads(3, _train, _unequal, True)
    assert len(logged) == 1


@pytest.mark.parametrize(("size", "share"), [(1, _same), (2, _own), (3, _own)])
def test_shares_of_one_batch_and_one_rank_are_no_mistake(logged, size, share):
    run_threads(size, _train, share)
    assert logged == []


def test_gradients_of_zero_on_all_ranks_prove_nothing():
    assert problems_of("M", [0, 1], checksums=[], num_rows=[2, 2], is_weighted=False) == []
    assert problems_of("M", [4, 7], checksums=[1, 1], num_rows=[2, 2], is_weighted=False)


def test_unknown_rows_prove_nothing():
    assert problems_of("M", [0, 1], checksums=[1, 2], num_rows=[0, 5], is_weighted=False) == []
