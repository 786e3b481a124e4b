"""Groups over a process group of torch: NCCL on a GPU, Gloo on the CPU."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from test_gpu_copies import CALLS, DTYPES

from braid.comm import Group
from braid.comm.engines.c10d import C10dEngine, MakeProcessGroup, make_gloo, make_nccl
from braid.errors import CommTimeout, ConfigError, StaleError
from support.delegated_world import delegated_world

MAKERS: dict[str, MakeProcessGroup] = {"cpu": make_gloo, "cuda": make_nccl}
COLLECTIVES = {name: call for name, call in CALLS.items() if name != "send, recv"}


def attached(group: Group, device: str) -> C10dEngine:
    """Attach an engine of torch for tensors on the device."""
    kinds = frozenset({device})
    engine = C10dEngine(
        group.context, group.ranks, MAKERS[device], device_types=kinds, name="attached"
    )
    group.attach(engine)
    return engine


def _differences(group: Group, device: str) -> tuple[list[str], int]:
    """Compare with the group on the CPU before the engine is there; return calls, too."""
    inputs = {dtype: torch.randint(-9, 9, (24, 5)).to(dtype) for dtype in DTYPES}
    expected = {
        (name, dtype): call(group, x.clone())
        for name, call in COLLECTIVES.items()
        for dtype, x in inputs.items()
    }
    engine = attached(group, device)
    different = []
    for (name, dtype), result in expected.items():
        found = COLLECTIVES[name](group, inputs[dtype].to(device))
        is_same = found.device.type == device and torch.equal(found.cpu(), result)
        different += [] if is_same else [f"{name} {dtype}"]
    num_operations = engine.statistics.num_operations
    engine.close()
    return different, num_operations


def test_every_collective_of_one_rank_has_the_result_of_the_plain_group(procs, device):
    ((different, num_operations),) = procs(1, _differences, device)
    assert different == []
    assert num_operations == len(COLLECTIVES) * len(DTYPES)


def _sums(group: Group, device: str) -> list[bool]:
    engine = attached(group, device)
    x = torch.full((1 << 10, 1 << 10), 0.5, device=device)
    for _ in range(5):
        x = x @ x / (1 << 9)  # 0.5, once the device has computed it
    work = group.all_reduce(x, async_op=True)
    work.wait()
    y = x * 2
    half = group.split(0)
    assert half is not None
    before = engine.statistics.num_operations
    z = half.all_gather(y[0])
    found = [
        torch.equal(y, torch.ones_like(y)),
        torch.equal(z.flatten(), y[0]),
        engine.statistics.num_operations == before,  # the subgroup has an engine for the device
        "chooses its algorithms itself" in engine.explain(),
    ]
    half.close()
    engine.close()
    return found


def test_work_is_ordered_with_kernels_and_subgroups_have_their_own_engine(procs, device):
    assert procs(1, _sums, device) == [[True] * 4]


def _after_close(group: Group, device: str) -> str:
    engine = attached(group, device)
    group.all_reduce(torch.ones(3, device=device))
    engine.close()
    with pytest.raises(StaleError) as caught:
        group.all_reduce(torch.ones(3, device=device))
    return str(caught.value)


def test_a_closed_engine_is_refused_with_the_description_of_the_call(procs, device):
    (text,) = procs(1, _after_close, device)
    assert text == ("all_reduce(float32[3], sum) was called on a group that has ended: was closed")


def _refused(group: Group, device: str) -> str:
    world = delegated_world(group.context, MAKERS[device])
    with pytest.raises(ConfigError) as caught:
        world.all_reduce(torch.ones(3, device=device), algorithm="direct")
    world.close()
    return str(caught.value)


def test_algorithms_of_other_engines_are_refused(procs, device):
    assert "algorithm 'direct' cannot be used" in procs(1, _refused, device)[0]


def _two_on_one_gpu(group: Group, path: str) -> list[str]:
    torch.cuda.set_device(0)
    texts = []
    world = delegated_world(group.context, make_nccl)
    with pytest.raises(ConfigError) as caught:
        world.all_reduce(torch.ones(3, device="cuda"))
    texts.append(str(caught.value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(
            "cpu:braid,cuda:nccl",
            init_method=f"file://{path}",
            rank=group.rank,
            world_size=group.size,
        )
        with pytest.raises(ConfigError) as caught:
            dist.all_reduce(torch.ones(3, device="cuda"))
        texts.append(str(caught.value))
        x = torch.ones(3)
        dist.all_reduce(x)  # tensors of the CPU still travel
        texts.append(str(x.tolist()))
        dist.destroy_process_group()
    group.barrier()
    return texts


def test_two_ranks_on_one_gpu_are_refused_by_name(procs, device, tmp_path):
    if device == "cpu":
        pytest.skip("Gloo lets ranks share a CPU")
    for texts in procs(2, _two_on_one_gpu, str(tmp_path / "store")):
        for text in texts[:2]:
            assert text.startswith("ranks 0 and 1 are both on the GPU at PCI bus")
        assert texts[2] == "[2.0, 2.0, 2.0]"


# last: it can leave a process that takes long to end
def _late(group: Group, device: str) -> str:
    """Wait too short a time: for a kernel before the sum, or for the other rank."""
    if device == "cuda":  # torch's watchdog would end the process after the error
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    world = delegated_world(group.context, MAKERS[device])
    x = torch.ones(3, device=device)
    world.all_reduce(x)
    world.all_reduce(x)
    text = ""
    if device == "cuda":
        torch.cuda._sleep(5 * 10**9)
    if group.rank == 0:
        with pytest.raises(CommTimeout) as caught:
            world.all_reduce(x, timeout_s=0.5)
        text = str(caught.value)
    group.barrier()
    world.close()
    return text


def test_a_late_sum_is_a_timeout_that_names_the_sum(procs, device):
    size = 1 if device == "cuda" else 2
    text = procs(size, _late, device)[0]
    assert "all_reduce(float32[3], sum)" in text
