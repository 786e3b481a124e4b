"""Groups: rows and columns of a mesh, a torch group, a failure in one group, a rebuilt world.

braid run -n 4 examples/06_groups.py
"""

import time

import torch
import torch.distributed as dist

import braid

REPEATS = 20
group = braid.init()
rank = group.rank
everybody = [torch.randn(5, generator=torch.Generator().manual_seed(r)) for r in range(4)]
x = everybody[rank]

# split: ranks that pass the same color form one group, in the order of ranks
row = group.split(color=rank // 2)
column = group.split(color=rank % 2)
print(f"rank {rank} is rank {row.rank} of row {row.ranks}, {column.rank} of column {column.ranks}")
total = column.all_reduce(row.all_reduce(x.clone()))  # of rows first, then of their sums
assert torch.equal(total, (everybody[0] + everybody[1]) + (everybody[2] + everybody[3]))

# torch groups: all ranks create every group in the same order, also ranks that are not members
dist.init_process_group("braid", rank=rank, world_size=group.size)
ends = dist.new_group([0, 3])
pair = x.clone()
if rank in {0, 3}:
    dist.all_reduce(pair, group=ends)
    assert torch.equal(pair, everybody[0] + everybody[3])

start = time.perf_counter()
for _ in range(REPEATS):
    group.split(0).close()
split_us = (time.perf_counter() - start) / REPEATS * 1e6
start = time.perf_counter()
for _ in range(REPEATS):
    dist.destroy_process_group(dist.new_group([0, 1, 2, 3]))
torch_us = (time.perf_counter() - start) / REPEATS * 1e6
dist.destroy_process_group()

# a failure ends only its group: row (2, 3)
if rank == 3:
    row.abort("rank 3 has had enough")
elif rank == 2:
    try:
        row.all_reduce(x.clone())
    except braid.CommError as error:
        print(error)
assert torch.equal(column.all_reduce(x.clone()), everybody[rank % 2] + everybody[rank % 2 + 2])

# three of four ranks continue as a smaller world, without rank 3
if rank != 3:
    start = time.perf_counter()
    group = group.rebuild([0, 1, 2])
    rebuild_us = (time.perf_counter() - start) * 1e6
    assert group.epoch == 1
    assert torch.equal(group.all_reduce(x.clone()), everybody[0] + everybody[1] + everybody[2])
if rank == 0:
    print(f"split {split_us:.0f} us, new_group {torch_us:.0f} us, rebuild {rebuild_us:.0f} us")
    print("all sums equal one process, bit by bit")
