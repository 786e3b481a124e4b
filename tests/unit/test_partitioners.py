"""Partitioners divide rows as TensorFlow's do, and refuse what cannot be divided."""

from __future__ import annotations

import pytest
import torch

from braid.errors import ConfigError
from braid.strategies.parameter_server import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
)
from braid.strategies.parameter_server.partitioners import rows_of_shards

F32 = torch.float32


def shards(partitioner, *shape):
    return rows_of_shards(partitioner, torch.Size(shape), F32, 64)


def test_the_first_shards_have_one_row_more():
    assert shards(FixedShardsPartitioner(5), 13, 4) == [3, 3, 3, 2, 2]
    assert shards(FixedShardsPartitioner(5), 3) == [1, 1, 1]
    assert shards(FixedShardsPartitioner(5)) == [1]
    assert shards(None, 13, 4) == [13]


def test_shards_have_at_least_some_bytes():
    by_size = MinSizePartitioner(min_shard_bytes=64, max_shards=4)
    assert shards(by_size, 10, 4) == [5, 5]  # 160 bytes
    assert shards(by_size, 100, 4) == [25] * 4
    assert shards(by_size, 3) == [3]
    assert shards(MinSizePartitioner(), 1 << 20) == [1 << 20], "one shard at most"


def test_shards_have_at_most_some_bytes():
    by_size = MaxSizePartitioner(max_shard_bytes=64)
    assert shards(by_size, 10, 4) == [4, 3, 3]  # rows of 16 bytes
    assert shards(by_size, 4, 4) == [4]
    assert shards(by_size, 3, 100) == [1, 1, 1], "a row is never divided"
    assert shards(MaxSizePartitioner(64, max_shards=2), 10, 4) == [5, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedShardsPartitioner(0), "num_shards must be at least 1, got 0"),
        (lambda: MaxSizePartitioner(-1), "max_shard_bytes must be at least 1, got -1"),
        (lambda: shards(lambda *_: [1, 2], 4, 4), r"into \[1, 2\] shards: return one number"),
        (lambda: shards(lambda *_: [5], 4), "the 4 rows .* into 5 shards: choose 1 to 4"),
    ],
)
def test_what_cannot_be_divided_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
