"""Every algorithm of the catalogue, carried out on the channels of a group, against what it promises."""

from __future__ import annotations

import pytest
import torch

from braid.comm.algorithms.programs import Programs, program_steps
from braid.comm.channel.control_pages import ControlPages
from braid.errors import ConfigError
from braid.programs.schedule import Program
from braid.programs.schedule.collective import ALGORITHMS, algorithm, program
from support.explorer import explore, record

NUMELS = (0, 1, 7, 60, 601)  # fewer than there are blocks, and no multiple of them
WHOLE = ("all_reduce", "broadcast", "reduce")  # the others take parts of one size


class _Hosts(Programs):
    """The programs of a rank, those over hosts of `row` ranks among them."""

    def __init__(self, rank: int, size: int, row: int) -> None:
        super().__init__(rank, size)
        self.size = size
        self.row = row

    def program(self, name: str, operation: str, root: int) -> Program:
        if name == "hierarchical":
            return program(algorithm(name, operation, self.size, row=self.row))
        return super().program(name, operation, root)


def _buffer(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(float(numel)) * (rank + 1) + rank


def _promised(
    operation: str, rank: int, everybody: list[torch.Tensor]
) -> tuple[int, torch.Tensor] | None:
    """Where in the buffer of `rank` what must be."""
    size, length = len(everybody), everybody[0].numel()
    total = torch.stack(everybody).sum(0)
    if operation in {"reduce", "gather"} and rank:
        return None
    if operation in {"all_reduce", "reduce"}:
        return 0, total
    if operation == "broadcast":
        return 0, everybody[0]
    width = length // (size * 2 if operation == "all_to_all" else size)
    own = slice(width * rank, width * (rank + 1))
    if operation == "reduce_scatter":
        return own.start, total[own]
    if operation == "scatter":
        return own.start, everybody[0][own]
    if operation == "all_to_all":
        return length // 2, torch.cat([x[own] for x in everybody])
    return 0, torch.cat([x[width * q : width * (q + 1)] for q, x in enumerate(everybody)])


def _checked(port: ControlPages, name: str, operation: str, numels: tuple[int, ...], row: int):
    """Carry out one algorithm on buffers of these lengths, or of so many elements a part."""
    ch, programs = port.channel(0), _Hosts(port.rank, port.size, row)
    ch.digest = 1
    rows = 1 if operation in WHOLE else port.size * (2 if operation == "all_to_all" else 1)
    for numel in numels:
        everybody = [_buffer(rank, numel * rows) for rank in range(port.size)]
        x = everybody[port.rank].clone()
        yield from program_steps(ch, programs, name, operation, x)
        promised = _promised(operation, port.rank, everybody)
        if promised is not None:
            at, want = promised
            assert torch.equal(x[at : at + len(want)], want), (port.rank, numel)


@pytest.mark.parametrize("size", [1, 2, 3, 5, pytest.param(8, marks=pytest.mark.proof)])
@pytest.mark.parametrize(("name", "operation"), sorted(ALGORITHMS))
def test_an_algorithm_gives_what_it_promises(name, operation, size):
    record(size, lambda port: _checked(port, name, operation, NUMELS, size))


def test_hosts_of_three_ranks_add_up_what_everybody_has():
    record(6, lambda port: _checked(port, "hierarchical", "all_reduce", (100,), 3))


@pytest.mark.parametrize(("name", "operation"), sorted(ALGORITHMS))
def test_no_interleaving_of_a_program_deadlocks_or_races(name, operation):
    for size in (2, 3):
        found = explore(record(size, lambda port: _checked(port, name, operation, (7, 60), 1)))
        assert (found.deadlocks, found.races) == ([], []), size


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        ("avg", torch.float32, 1.0),
        ("max", torch.int64, 2),
        ("product", torch.bfloat16, 0.0),
        ("bor", torch.uint8, 3),
    ],
)
def test_reductions_and_dtypes_are_those_of_the_group(op, dtype, expected):
    found: dict[int, list[float]] = {}

    def steps(port: ControlPages):
        ch, x = port.channel(0), torch.full((5,), port.rank, dtype=dtype)
        ch.digest = 1
        yield from program_steps(ch, Programs(port.rank, 3), "ring", "all_reduce", x, op=op)
        found[port.rank] = x.tolist()

    record(3, steps)
    assert found == {rank: [expected] * 5 for rank in range(3)}


@pytest.mark.parametrize("operation", ["all_gather", "all_to_all"])
def test_parts_must_be_of_one_size(operation):
    def steps(port: ControlPages):
        name = "ring" if operation == "all_gather" else "pairwise"
        return program_steps(
            port.channel(0), Programs(port.rank, 3), name, operation, torch.ones(10)
        )

    with pytest.raises(ConfigError, match="needs parts of equal size"):
        record(3, steps)
