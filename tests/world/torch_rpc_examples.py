"""The seven example programs for torch's remote calls, one after another in four processes.

python torch_rpc_examples.py rnn,rl 29500 29501 29502    a port for each, and one for DDP
RPC_FROM=torch python torch_rpc_examples.py rnn 29500 29501    the same program on torch
"""

from __future__ import annotations

import os
import sys

import torch
from torch_rpc_actors import batch_parameter_server, batch_reinforce, rl
from torch_rpc_models import ddp_rpc, parameter_server, pipeline, rnn

PROGRAMS = {  # name -> program of a rank, world size
    "rnn": (rnn, 2),
    "pipeline": (pipeline, 3),
    "parameter_server": (parameter_server, 2),
    "rl": (rl, 3),
    "batch_parameter_server": (batch_parameter_server, 3),
    "batch_reinforce": (batch_reinforce, 3),
    "ddp_rpc": (ddp_rpc, 4),
}


def run(rank: int, names: list[str], ports: list[str]) -> None:
    """Be a node of each program."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "DDP_PORT": ports[-1]}
    for name, port in zip(names, ports, strict=False):
        program, world_size = PROGRAMS[name]
        os.environ["MASTER_PORT"] = port
        if rank < world_size and not program(rank):
            print("failed:", name, rank, flush=True)


if __name__ == "__main__":
    chosen = sys.argv[1].split(",")
    torch.multiprocessing.spawn(run, args=(chosen, sys.argv[2:]), nprocs=4)
    print("ended:", *chosen)
