"""Templates of the files that `braid convert` writes beside the stages."""

from __future__ import annotations

__all__ = ["FUSED", "README", "TRAIN"]

FUSED = '''\
"""All stages of {about} in sequence; `braid convert` wrote it."""

from torch import nn

{imports}


class Fused(nn.Module):
    """Takes the tensors of the batch in their order, and returns the model's result."""

    def __init__(self, model):
        super().__init__()
        self.stages = nn.Sequential({stages})
        self.training = model.training

    def forward(self, *batch):
        return self.stages(batch if len(batch) > 1 else batch[0])
'''
TRAIN = '''\
"""Trains the stages of {about} on the ranks of a mesh; `braid convert` wrote it.

    braid run -n {num_stages} {out}/train.py {out}/model_parallel.json

Replace batches, loss and optimizer by your own.
"""

import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str((HERE / {above!r}).resolve())]

import braid
from braid.comm.autograd.nested import flatten, tensors_in
from braid.programs.layout import Mesh
from {module} import {function}
{imports}


def loss_of(output, target):
    """Return the mean loss of the samples; this one knows no task."""
    return sum(x.float().square().mean() for x in tensors_in(output) if x.is_floating_point())


def main(config):
    group = braid.init()
    mesh = Mesh(config["mesh"])
    here = mesh.coordinates(group.rank)
    torch.manual_seed(0)
    model, example = {function}()
    pipeline = braid.Pipeline(
        [{stages}],
        balance=config["balance"],
        schedule=config["schedule"],
        num_microbatches=config["microbatches"],
        group=group.split(here["dp"]),
        replicas=group.split(here["pp"]),
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
    _, tensors = flatten(example)
    own = [x.tensor_split(mesh.axes["dp"])[here["dp"]] if x.dim() else x for x in tensors]
    batch = tuple(own) if len(own) > 1 else own[0]
    for step in range(config["steps"]):
        loss = pipeline.step(batch, batch, loss=loss_of)
        optimizer.step()
        optimizer.zero_grad()
        if group.rank == 0:
            print(f"step {{step}} loss {{loss.item():.6f}}")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
'''
README = """\
# {about} in {num_stages} stages

`braid convert` wrote these files. `{module}.{function}()` creates the parameters and modules;
the files define the order in which they are called.

| file | |
|---|---|
{table}
| `fused.py` | `Fused(model)`: all stages in sequence: the whole model |
| `train.py` | trains the stages on a mesh; put your own batches, loss and optimizer there |

## How to run

| configuration | command |
|---|---|
{commands}

A configuration has the axes of the mesh (`pp`: ranks with different stages, `dp`: ranks with the
same stages and other samples), the number of stages on each rank along `pp` (`balance`), the
schedule of the pipeline, the number of micro-batches of a batch, and the number of steps.
"""
