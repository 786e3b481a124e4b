"""One model on several meshes: bytes along each axis, the best placement, the same result.

braid run -n 4 examples/27_which_axis.py
"""

from __future__ import annotations

import torch
from torch import nn

import braid
from braid.parallel.hybrid import HybridParallel
from braid.programs.layout import Mesh, place
from braid.programs.topology import Cluster, Level

D, H, LAYERS, ROWS, STEPS = 32, 128, 4, 16, 3
MESHES = {"dp=4": 0, "dp=2,tp=2": 0, "pp=2,tp=2": 0, "pp=2,dp=2": 2}  # -> shard
HOSTS = Cluster(  # two hosts of two ranks
    [
        Level(name="host", size=2, latency_s=2e-6, bytes_per_s=450e9),
        Level(name="rack", size=2, latency_s=5e-6, bytes_per_s=50e9),
    ]
)


def new_training() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D)) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).double()
    return model, torch.optim.AdamW(model.parameters())


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(step)).double()


def train(mesh: str, shard: int, group: braid.Group) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Train on a mesh; return the whole parameters, and the bytes of a step along each axis."""
    model, optimizer = new_training()
    plan = {r"\.0$": "column", r"\.2$": "row"}
    hybrid = HybridParallel(model, mesh, group, plan=plan, num_microbatches=2, shard=shard)
    hybrid.attach(optimizer)
    sent = {"dp": float(sum(8 * param.numel() for param in hybrid.parameters()))}  # gradients
    replicas = hybrid.groups["dp"]
    for step in range(STEPS):
        before = {axis: sub.statistics()["nbytes"] for axis, sub in hybrid.groups.items()}
        x = batch(step).chunk(replicas.size)[replicas.rank]
        hybrid.step(x, -x, loss=nn.functional.mse_loss)
        for axis in ("pp", "tp"):
            sent[axis] = float(hybrid.groups[axis].statistics()["nbytes"] - before[axis])
        optimizer.step()
        hybrid.zero_grad()
    hybrid.make_whole()
    return list(model.parameters()), {axis: sent[axis] for axis in Mesh.parse(mesh).axes}


def main() -> None:
    group = braid.init()
    whole, optimizer = new_training()
    for step in range(STEPS):
        nn.functional.mse_loss(whole(batch(step)), -batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mesh, shard in MESHES.items():
        (params, sent), (again, _) = train(mesh, shard, group), train(mesh, shard, group)
        placement = place(Mesh.parse(mesh), HOSTS, sent)
        if group.rank == 0:
            traffic = ", ".join(f"{axis} {nbytes:,.0f} bytes" for axis, nbytes in sent.items())
            print(f"{mesh}, shard={shard}: {traffic}; least time as {placement.mesh}")
        for first, second, param in zip(params, again, whole.parameters(), strict=True):
            assert torch.equal(first, second)
            assert (first - param).abs().max() < 1e-9
    if group.rank == 0:
        print("parameters equal one process up to rounding; two runs agree bit by bit")


if __name__ == "__main__":
    main()
