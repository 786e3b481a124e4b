"""A real data parallel job that strikes itself: `python comm_fault_job.py "kill rank=1 step=3 in=backward"`."""

from __future__ import annotations

import sys

import torch
from torch import nn

import braid
from support.faults import FaultScript

NUM_STEPS = 20


def main(faults: str) -> None:
    group = braid.init()
    events = group.context.events
    FaultScript.from_text(faults).arm(group.rank, events)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    wrapped = braid.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        with events.span("step", seq=step):
            with events.span("forward"):
                loss = wrapped(torch.randn(8, 16)).square().mean()
            with events.span("backward"):
                loss.backward()
            with events.span("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            group.all_reduce(loss.detach())


if __name__ == "__main__":
    main(sys.argv[1])
