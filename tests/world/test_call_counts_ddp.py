"""The path of a backward through braid stays short."""

from __future__ import annotations

import torch
from torch import nn

from braid.comm import Group
from braid.parallel.data_parallel import DistributedDataParallel
from support.call_counts import CallCounts, count_calls

WIDTH = 32
CAP_MB = 0.0125  # two buckets of the six layers below
PER_PARAMETER = 4  # hook, reducer, bucket, gradient into its view
MAX_OWN_CALLS = 68  # of params and data_parallel, besides those for each parameter
MAX_CALLS = 250
MAX_FILES = 36


def _backward(group: Group, num_layers: int) -> tuple[int, CallCounts]:
    with torch.random.fork_rng():
        net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    cap_mb = CAP_MB * num_layers / 6
    wrapped = DistributedDataParallel(net, process_group=group, bucket_cap_mb=cap_mb)

    def step() -> CallCounts:
        net.zero_grad()
        loss = wrapped(torch.ones(4, WIDTH)).square().mean()
        return count_calls(loss.backward)

    counts = [step() for _ in range(30)]
    return wrapped.num_buckets, min(
        counts[5:], key=lambda c: c.calls
    )  # the others have waited for a peer


def _own(counts: CallCounts) -> int:
    packages = ("parallel/gradients/", "parallel/data_parallel/")
    return sum(n for name, n in counts.by_function.items() if name.startswith(packages))


def test_a_backward_of_twelve_parameters_makes_few_calls(procs):
    results = procs(2, _backward, 6)
    for num_buckets, counts in results:
        assert num_buckets == 2
        assert _own(counts) <= MAX_OWN_CALLS + 12 * PER_PARAMETER, counts.by_function
    counts = min(
        (counts for _, counts in results), key=lambda c: c.calls
    )  # came last, did not wait
    assert counts.calls <= MAX_CALLS, counts.by_function
    assert counts.files <= MAX_FILES, counts.by_function


def test_a_further_parameter_costs_four_calls(procs):
    few, many = (procs(2, _backward, num_layers) for num_layers in (6, 12))
    for (_, before), (num_buckets, after) in zip(few, many, strict=True):
        assert num_buckets == 2
        assert _own(after) - _own(before) == 12 * PER_PARAMETER
