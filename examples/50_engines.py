"""Read the variables that six launchers set for a rank, with one function.

braid run -n 2 examples/50_engines.py

The job is made up: four ranks on hosts a and b. Each of the two processes reads the variables of
the ranks of one host.
"""

from __future__ import annotations

import braid
from braid.launch.cluster.rank_assignment import RankPlace, assign, parse_hosts
from braid.runtime.rendezvous import JobEnvironment
from braid.runtime.rendezvous.engine_ranks import as_torchrun

COLUMNS = "{:11} {:>4} {:>4} {:>5}  {:22} {}"
PLACES = assign(parse_hosts("a:2,b:2"))  # as `braid run -H a:2,b:2` does
SIZE, MEETING = len(PLACES), {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SECRETS = {"braid": "an inherited descriptor"}


def variables(place: RankPlace) -> dict[str, dict[str, object]]:
    """Return what each launcher sets for a rank."""
    rank, node, local, local_size = place
    return {
        "braid": JobEnvironment(
            rank=rank, world_size=SIZE, local_rank=local, local_world_size=local_size,
            node_rank=node, num_nodes=2, store_address="tcp://10.0.0.1:40001",
            secret_fd=3, events_fd=4, stacks_fd=5, master_addr="10.0.0.1", master_port=29500,
        ).to_environ(),
        "torchrun": {
            "RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_size,
            "TORCHELASTIC_RUN_ID": "job", **MEETING,
        },
        "srun": {
            "SLURM_JOB_ID": 12, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_LOCALID": local,
            "SLURM_NODEID": node, "SLURM_STEP_NUM_TASKS": SIZE,
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
        },
        "mpirun": {
            "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": SIZE,
            "OMPI_COMM_WORLD_LOCAL_RANK": local, "OMPI_COMM_WORLD_LOCAL_SIZE": local_size,
            "OMPI_MCA_orte_hnp_uri": "66.0;tcp://10.0.0.1:55103", "PMIX_NAMESPACE": 660996097,
        },
        "mpiexec": {  # of MPICH, with -genv for the meeting place
            "PMI_RANK": rank, "PMI_SIZE": SIZE, "MPI_LOCALRANKID": local,
            "MPI_LOCALNRANKS": local_size, **MEETING,
        },
        "kubernetes": {  # a pod for each rank
            "JOB_COMPLETION_INDEX": rank, "WORLD_SIZE": SIZE, "HOSTNAME": f"train-{rank}",
            "MASTER_ADDR": "train-0.train",
        },
    }  # fmt: skip


def read(values: dict[str, object]) -> JobEnvironment:
    """Read variables as `braid.init()` reads its environment."""
    environ = {name: str(value) for name, value in values.items()}
    engine, more = as_torchrun(environ)
    return JobEnvironment.parse(environ | more, engine)


group = braid.init()
rows = []
for place in PLACES:
    if place.node == group.rank:
        for name, values in variables(place).items():
            env = read(values)
            local = 0 if name == "kubernetes" else place.local_rank
            assert (env.rank, env.world_size, env.local_rank) == (place.rank, SIZE, local)
            assert env.launched_by == name
            meeting = env.store_address or f"{env.master_addr}:{env.master_port}"
            rows.append([name, env.rank, env.world_size, env.local_rank, meeting])
everybody = group.objects.all_gather(rows)
if group.rank == 0:
    print(COLUMNS.format("launcher", "rank", "size", "local", "ranks meet at", "secret"))
    for row in everybody[-1][-6:]:
        print(COLUMNS.format(*row, SECRETS.get(row[0], "BRAID_SECRET_FILE")))
    print("six launchers describe every rank as `braid run -H a:2,b:2` does, bit by bit")
