"""Resume training on another mesh: two replicas, then a pipeline of divided layers, then one rank.

braid run -n 4 examples/28_checkpoints_change_shape.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import braid
from braid.checkpoint import BackgroundSaver, read_model
from braid.parallel.hybrid import HybridParallel

D, H, LAYERS, ROWS, STEPS = 64, 256, 4, 16, 2


def new_training() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D)) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).double()
    return model, torch.optim.AdamW(model.parameters())


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(step)).double()


def train_on(mesh: str, group: braid.Group, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = new_training()
    plan = {r"\.0$": "column", r"\.2$": "row"}
    hybrid = HybridParallel(model, mesh, group, plan=plan, num_microbatches=2)
    hybrid.attach(optimizer)
    start, stalls = braid.load(folder, model=hybrid, optimizer=optimizer, group=group), []
    replicas = hybrid.groups["dp"]
    with BackgroundSaver(group) as saver:
        for step in range(start, start + STEPS):
            x = batch(step).chunk(replicas.size)[replicas.rank]
            hybrid.step(x, -x, loss=nn.functional.mse_loss)
            optimizer.step()
            hybrid.zero_grad()
            snapshot, state = hybrid.checkpoint(optimizer)
            stalls.append(saver.save(folder, snapshot, step=step, state=state).stall_s)
            saver.wait()  # only here: training does not need to wait
    began = time.perf_counter()
    braid.save(folder.with_name("other"), model=hybrid, optimizer=optimizer, step=0, group=group)
    times = " ".join(f"{1e3 * s:.1f}" for s in (time.perf_counter() - began, *stalls))
    if group.rank == 0:
        print(f"{mesh}: steps {start} to {step}; ms of a save: {times} (two behind the training)")
    hybrid.make_whole()
    return {name: param.detach() for name, param in model.named_parameters()}


def main() -> None:
    group = braid.init()
    two, alone = (group.split(0 if group.rank < size else None) for size in (2, 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(group.objects.broadcast(name)) / "checkpoints"  # from rank 0
        if two is not None:
            train_on("dp=2", two, folder)
        params = train_on("pp=2,tp=2", group, folder)
        if alone is not None:
            assert all(torch.equal(x, params[name]) for name, x in read_model(folder).items())
            params = train_on("pp=1", alone, folder)
    if alone is not None:
        whole, optimizer = new_training()
        for step in range(3 * STEPS):
            nn.functional.mse_loss(whole(batch(step)), -batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all((params[n] - p).abs().max() < 1e-9 for n, p in whole.named_parameters())
        print("the checkpoint equals the model bit by bit, and parameters equal one process")


if __name__ == "__main__":
    main()
