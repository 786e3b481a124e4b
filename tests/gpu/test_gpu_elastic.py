"""Elastic training on a device that ranks share: a rank dies, and the parameters equal an undisturbed run bit by bit."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bounds import remaining_s

BEGIN = """
import hashlib, os, signal, sys, torch, braid
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)  # sums on the CPU depend on it
device, mesh, shard, *deaths = sys.argv[1:]
number = os.environ.get("RANK")
x = torch.linspace(-2.0, 2.0, 512).sin().view(64, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        rows = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 1)]
        self.rows = nn.ModuleList(rows)

    def forward(self, x):
        for row in self.rows:
            x = row(x)
        return x


def build():
    torch.manual_seed(0)
    model = Layers().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(output, target):
    if f"{number}:{training.num_steps}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return functional.mse_loss(output, target)


def report(model):
    tensors = [tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values()]
    assert all(tensor.device.type == device for tensor in model.state_dict().values())
    print(training.num_steps, hashlib.sha256(b"".join(tensors)).hexdigest(), flush=True)


braid.init()
"""
WHOLE = f"""{BEGIN}
model, optimizer = build()
with braid.elastic(model, optimizer, shards=4) as training:
    for _ in training.epochs(2):
        for a, b in training.batches(loader):
            with training.step():
                loss_of(model(a.to(device)), b.to(device)).backward()
report(model)
"""
MESH = f"""{BEGIN}
with braid.elastic_mesh(
    build, mesh, layers=lambda model: list(model.rows), shards=4, clip=1.0,
    shard=int(shard), num_microbatches=2,
) as training:
    for _ in training.epochs(2):
        for a, b in training.batches(loader):
            with training.step():
                training.model.step(a.to(device), b.to(device), loss=loss_of)
training.model.make_whole()
report(training.model.model)
"""


def digests(folder: Path, program: str, *words: str, num_ranks: int = 1) -> list[str]:
    """Run ranks that share the device; return what they print: the steps, and a hash of the state."""
    (folder / "train.py").write_text(program)
    options = [f"-n={num_ranks}", f"--min-ranks={num_ranks}", "--restarts=1", "--log-dir=run"]
    launcher = ["-m", "braid", "run", *options] if num_ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, "train.py", *words],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=remaining_s(100) - 5,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"8 [0-9a-f]{64}", done.stdout)
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("program", "num_ranks", "mesh", "shard"),
    [(WHOLE, 2, "dp=2", "0"), (MESH, 4, "pp=2,dp=2", "3")],
    ids=["replicas", "sharded stages"],
)
def test_a_lost_rank_on_the_device_leaves_the_bits_of_one_process(
    tmp_path, device, program, num_ranks, mesh, shard
):
    (alone,) = digests(tmp_path, program, device, "dp=1", "0")
    found = digests(tmp_path, program, device, mesh, shard, "1:3", num_ranks=num_ranks)
    assert found == [alone] * num_ranks
