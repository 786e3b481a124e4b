"""Logistic regression with FTRL on hashed features: lines of prose against lines of Python.

    braid run --servers 2 --workers 2 examples/ps_hashed_features.py

Each feature is a word or a pair of neighbours, hashed to 63 bits, so no dictionary is needed. The
servers create a weight when it is first pushed. The L1 norm makes most weights exactly zero.

Source: H. B. McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013.
"""

import itertools
import random
import re
import zlib
from pydoc_data.topics import topics

import torch
from torch.nn import functional

import braid
from braid import ps
from braid.train.corpus import standard_library

LINES, BATCH, TEST = 24_000, 200, 4_000
SUM = ps.Consistency(aggregate="sum")


def features(line: str) -> list[int]:
    """Return the hashed words and pairs of neighbours of a line."""
    parts = ["", *re.findall(r"\w+|[^\w\s]", line)]
    texts = [*parts[1:], *map(" ".join, itertools.pairwise(parts))]
    return [zlib.crc32(t.encode()) << 31 | zlib.adler32(t.encode()) >> 1 for t in texts]


def lines() -> list[tuple[list[int], float]]:
    """Return features and labels of lines: 1 for prose of the handbook, 0 for Python."""
    text = standard_library().train.decode(errors="ignore")
    prose = {line.strip() for topic in topics.values() for line in topic.split("\n")}
    code = {line.strip() for line in text.split("\n")} - prose
    chance = random.Random(0)
    chosen = []
    for label, kind in ((1.0, prose), (0.0, code)):
        long = sorted(line for line in kind if len(line) > 25)
        sample = chance.sample(long, min(len(long), LINES // 2))
        chosen += [(features(line), label) for line in sample]
    chance.shuffle(chosen)
    return chosen


def logits(weights: ps.Embedding, rows: list[tuple[list[int], float]]) -> torch.Tensor:
    """Return the sum of the weights of each line's features."""
    ids = torch.tensor([number for numbers, _ in rows for number in numbers])
    ends = torch.tensor([len(numbers) for numbers, _ in rows]).cumsum(0)
    line = torch.bucketize(torch.arange(len(ids)), ends, right=True)
    return torch.zeros(len(rows)).index_add(0, line, weights(ids).squeeze(-1))


def labels(rows: list[tuple[list[int], float]]) -> torch.Tensor:
    return torch.tensor([label for _, label in rows])


group = braid.init()
with ps.join(group) as node:
    table = node.sparse("weights", 1, ps.FTRL(alpha=0.5, l1=1.0), SUM, init=ps.Constant(0.0))
    if not node.is_worker:
        node.serve()
    else:
        rows = lines()
        train, test = rows[TEST:], rows[:TEST]
        weights = ps.Embedding(table)
        for begin in range(0, len(train) - BATCH + 1, BATCH):
            share = train[begin : begin + BATCH][node.number :: node.num_workers]
            functional.binary_cross_entropy_with_logits(
                logits(weights, share), labels(share), reduction="sum"
            ).backward()
            weights.step()
        with torch.no_grad():
            right = ((logits(weights, test) > 0) == labels(test).bool()).double().mean()
        ids = torch.tensor(sorted({number for numbers, _ in train for number in numbers}))
        zeros = (table.pull(ids) == 0).double().mean()
        print(f"worker {node.number}: {right:.1%} right; of {len(ids):,} weights {zeros:.0%} are 0")
        assert right > 0.9
        assert zeros > 0.5
