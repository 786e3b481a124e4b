"""Tensors of the device in every collective: ranks share one GPU and copy through pinned memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from timing import interleaved_ms

from braid.comm import Group

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
Call = Callable[[Group, torch.Tensor], torch.Tensor]


def _ring(group: Group, x: torch.Tensor) -> torch.Tensor:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    received = torch.empty_like(x)
    work = group.recv(received, before, async_op=True)
    group.send(x, after)
    work.wait()
    return received


CALLS: dict[str, Call] = {
    "all_reduce": lambda g, x: g.all_reduce(x.clone(), "max"),
    "reduce": lambda g, x: g.reduce(x.clone(), 0, "max"),
    "broadcast": lambda g, x: g.broadcast(x.clone(), g.size - 1),
    "all_gather": lambda g, x: g.all_gather(x),
    "reduce_scatter": lambda g, x: g.reduce_scatter(x, "max"),
    "all_to_all": lambda g, x: g.all_to_all(x),
    "gather": lambda g, x: x if (whole := g.gather(x, 0)) is None else whole,
    "scatter": lambda g, x: g.scatter(x if g.rank == 0 else None, 0, out=x[: len(x) // g.size]),
    "send, recv": _ring,
}


def _numbers(rank: int, dtype: torch.dtype, rows: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (rows, 5), generator=generator).to(dtype)


def _differences(group: Group, device: str) -> list[str]:
    different = []
    for name, call in CALLS.items():
        for dtype in DTYPES:
            x = _numbers(group.rank, dtype)
            here, there = call(group, x), call(group, x.to(device))
            is_same = there.device.type == device and torch.equal(here, there.cpu())
            different += [] if is_same else [f"{name} {dtype}"]
    return different


@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_has_the_result_of_tensors_of_the_cpu(procs, device, size):
    assert procs(size, _differences, device) == [[]] * size


def _views(group: Group, device: str, size: int) -> list[str]:
    z = torch.randn(size, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    x = z.to(device)
    views = {"conjugated": (x.conj(), z.conj()), "negated": (x.conj().imag, z.conj().imag)}
    found = {name: (group.all_gather(there), here) for name, (there, here) in views.items()}
    return [name for name, (x, y) in found.items() if not torch.equal(x[:size].cpu(), y)]


def test_views_that_are_conjugated_or_negated_are_sent_as_they_are_read(procs, device):
    size = 1 << 20 if device == "cuda" else 64
    assert procs(2, _views, device, size) == [[]] * 2


def _after_a_long_kernel(group: Group, device: str, size: int) -> list[bool]:
    """Start a sum while the device still computes what is summed, and write after it."""
    a = torch.full((size, size), 1.0 / size, device=device)
    x = torch.ones(size, size, device=device)
    for _ in range(20):
        x = x @ a  # ones, when it is done
    work = group.all_reduce(x, async_op=True)
    work.wait()
    x *= 2
    gathering = group.all_gather(x[0], async_op=True)
    gathering.wait()
    found = gathering.result
    return [torch.allclose(found, torch.full_like(found, 2.0 * group.size), rtol=1e-3)]


def test_a_collective_begins_when_its_tensor_is_written(procs, device):
    size = 4096 if device == "cuda" else 64
    assert procs(2, _after_a_long_kernel, device, size) == [[True]] * 2


def _rates(group: Group, device: str, nbytes: list[int], path: str) -> list[dict[str, float]]:
    """Milliseconds of a maximum over the ranks, in turns with Gloo's."""
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=group.rank, world_size=group.size
    )
    found = []
    for count in nbytes:
        x, y = (torch.ones(count // 4, device=device) for _ in range(2))
        calls: dict[str, Callable[[], object]] = {
            "ms": lambda x=x: group.all_reduce(x, "max"),
            "gloo_ms": lambda y=y: dist.all_reduce(y, dist.ReduceOp.MAX),
        }
        found.append(interleaved_ms(calls, device, rounds=5))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_rates_of_sums_of_ranks_on_one_device(procs, device, figures, size, tmp_path):
    nbytes = [1 << n for n in (range(10, 29, 3) if device == "cuda" else (10, 13))]
    found = procs(size, _rates, device, nbytes, str(tmp_path / "store"))[0]
    for count, times in zip(nbytes, found, strict=True):
        figures(
            ranks=size,
            nbytes=count,
            **{name: round(taken, 3) for name, taken in times.items()},
            gb_per_s=round(count / times["ms"] / 1e6, 3),
        )
        assert set(times) == {"ms", "gloo_ms"}
