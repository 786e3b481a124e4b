"""The seven example programs for torch's remote calls, one after another in four processes.

python torch_rpc_examples.py 29500 29501 ...      a port for each program, and one for DDP
RPC_FROM=torch python torch_rpc_examples.py ...   the same programs on torch
"""

from __future__ import annotations

import os
import sys

import torch
from torch_rpc_actors import batch_parameter_server, batch_reinforce, rl
from torch_rpc_models import ddp_rpc, parameter_server, pipeline, rnn

PROGRAMS = {  # program -> world size
    rnn: 2,
    pipeline: 3,
    parameter_server: 2,
    rl: 3,
    batch_parameter_server: 3,
    batch_reinforce: 3,
    ddp_rpc: 4,
}


def run(rank: int, ports: list[str]) -> None:
    """Be a node of each program."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "DDP_PORT": ports[-1]}
    for (program, world_size), port in zip(PROGRAMS.items(), ports, strict=False):
        os.environ["MASTER_PORT"] = port
        if rank < world_size and not program(rank):
            print("failed:", program.__name__, rank, flush=True)


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, args=(sys.argv[1:],), nprocs=4)
    print("ended:", *(program.__name__ for program in PROGRAMS))
