"""A training with Horovod's elastic names, for tests; ranks kill themselves where they are told to.

Arguments: a file for the results, then deaths as NUMBER:BATCH, numbers of ranks at the launcher and
of batches over all epochs. A rank dies before its backward of that batch, with NUMBER:start before
the training, or with NUMBER:reset when members have changed; NUMBER:BATCH:host kills its parent,
the agent of its host. `wait` waits for three members at batch 8, `move` for another process beside
the first, and `grow:FILE=HOSTS` writes a list of hosts then. `pair` adds a process set of ranks 0 and 1.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import braid.compat.horovod.torch as hvd

NUM_EPOCHS, BATCH, BATCHES_PER_COMMIT, LR = 3, 4, 2, 0.01
NUMBER = os.environ["RANK"]


class Numbered(torch.utils.data.Dataset):
    """Samples that know their number."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((8,), index / 48.0)


def wait_for_members(state: hvd.elastic.TorchState) -> None:
    """List hosts if a file is named for it, and wait for three members, or another process."""
    for word in sys.argv[2:]:
        if word.startswith("grow:") and hvd.rank() == 0:
            path, _, hosts = word.removeprefix("grow:").partition("=")
            Path(path).write_text(hosts.replace(",", "\n"))
    num_members = 2 - int(NUMBER) if "move" in sys.argv else 3
    while hvd.size() < num_members:
        time.sleep(0.1)
        state.check_host_updates()


def meet_before_training() -> None:
    """Call a collective outside of the training function if a rank dies there."""
    if any(word.endswith(":start") for word in sys.argv[2:]):
        hvd.allreduce(torch.ones(1))


def main() -> None:
    path, deaths = sys.argv[1], set(sys.argv[2:])
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair] if "pair" in deaths else None)

    def die_at(*point: object) -> None:
        if ":".join(map(str, point)) in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        if ":".join(map(str, (*point, "host"))) in deaths:
            os.kill(os.getppid(), signal.SIGKILL)

    die_at(NUMBER, "start")
    meet_before_training()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR * hvd.size(), momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    sampler = hvd.elastic.ElasticSampler(Numbered(), seed=1)
    loader = DataLoader(Numbered(), batch_size=BATCH, sampler=sampler)
    log = []

    @hvd.elastic.run
    def train(state) -> None:
        while state.epoch < NUM_EPOCHS:
            for number, (indices, x) in enumerate(loader):
                if deaths.intersection({"wait", "move"}) and state.total >= 8:
                    wait_for_members(state)
                optimizer.zero_grad()
                loss = functional.mse_loss(model(x), x.sum(1, keepdim=True))
                die_at(NUMBER, state.total)
                loss.backward()
                optimizer.step()
                if "pair" in deaths and hvd.size() > 1 and pair.included():
                    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair) == 2
                state.total += 1
                state.seen += hvd.allgather_object([state.epoch, *indices.tolist()])
                sampler.record_batch(number, BATCH)
                if state.total % BATCHES_PER_COMMIT == 0:
                    state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    def scale_lr() -> None:
        die_at(NUMBER, "reset")
        log.append(hvd.size())
        for group in optimizer.param_groups:
            group["lr"] = LR * hvd.size()

    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, total=0, seen=[])
    state.register_reset_callbacks([scale_lr])
    train(state)
    weights = torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])
    same = all(hvd.allreduce(weights, op=hvd.Min, name="least").eq(weights).tolist())
    lr = optimizer.param_groups[0]["lr"]
    found = {"seen": state.seen, "place": (hvd.rank(), hvd.size()), "sizes": log, "lr": lr}
    found["group"] = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    torch.save({**found, "same": same}, f"{path}.{NUMBER}")


main()
