"""Every algorithm of the catalogue, carried out on tensors over messages of a group, against what it promises."""

from __future__ import annotations

import pytest
import torch

from braid.comm import Group
from braid.comm.carrying_out import Stage, carry_out, stages
from braid.errors import ConfigError
from braid.schedule.collective import ALGORITHMS, algorithm, program
from braid.testing.worlds import run_threads

NUMELS = (0, 1, 7, 60, 601)  # fewer than there are blocks, and no multiple of them


def _buffer(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(float(numel)) * (rank + 1) + rank


def _promised(
    operation: str, rank: int, bounds: list[int], everybody: list[torch.Tensor]
) -> list[tuple[int, torch.Tensor]]:
    """Where in the buffer of `rank` what must be."""
    total = torch.stack(everybody).sum(0)
    if operation in {"all_reduce", "reduce"}:
        return [] if operation == "reduce" and rank else [(0, total)]
    if operation == "broadcast":
        return [(0, everybody[0])]
    own = slice(bounds[rank], bounds[rank + 1])
    if operation == "reduce_scatter":
        return [(own.start, total[own])]
    if operation == "scatter":
        return [(own.start, everybody[0][own])]
    if operation == "all_to_all":
        return [(len(total) // 2, torch.cat([x[own] for x in everybody]))]
    gathered = [x[bounds[q] : bounds[q + 1]] for q, x in enumerate(everybody)]
    return [] if operation == "gather" and rank else [(0, torch.cat(gathered))]


def _wrong(group: Group, name: str, operation: str) -> list[int]:
    made = program(algorithm(name, operation, group.size, row=group.size))
    blocks, found = made.header.num_units, []
    for numel in NUMELS:
        length = numel * blocks if operation == "all_to_all" else numel
        everybody = [_buffer(rank, length) for rank in range(group.size)]
        x = everybody[group.rank].clone()
        carry_out(stages(made, group.rank, length), x, group, size=group.size)
        bounds = [length * i // blocks for i in range(blocks + 1)]
        promised = _promised(operation, group.rank, bounds, everybody)
        right = all(torch.equal(x[at : at + len(want)], want) for at, want in promised)
        found += [] if right else [numel]
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5, pytest.param(8, marks=pytest.mark.proof)])
@pytest.mark.parametrize(("name", "operation"), sorted(ALGORITHMS))
def test_an_algorithm_gives_what_it_promises(name, operation, size):
    assert run_threads(size, _wrong, name, operation) == [[]] * size


def _grid(group: Group) -> torch.Tensor:
    made = program(algorithm("hierarchical", "all_reduce", 6, row=3))
    x = _buffer(group.rank, 100)
    carry_out(stages(made, group.rank, 100), x, group, size=6)
    return x


def test_hosts_of_three_ranks_add_up_what_everybody_has():
    expected = torch.stack([_buffer(rank, 100) for rank in range(6)]).sum(0)
    assert [torch.equal(x, expected) for x in run_threads(6, _grid)] == [True] * 6


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
    def main(group: Group) -> list[float]:
        made = program(algorithm("ring", "all_reduce", 3))
        x = torch.full((5,), group.rank, dtype=dtype)
        carry_out(stages(made, group.rank, 5), x, group, op=op, size=3)
        return x.tolist()

    assert run_threads(3, main) == [[expected] * 5] * 3


def test_blocks_beside_each_other_travel_without_a_copy():
    made = program(algorithm("halving_doubling", "all_reduce", 4))
    sent = [move for stage in stages(made, 0, 64) for move in stage.sends]
    assert [(move.peer, move.numel, move.aside) for move in sent] == [
        (2, 32, False),
        (1, 16, False),
        (1, 16, False),
        (2, 32, False),
    ]


def test_a_buffer_without_elements_sends_nothing():
    found = stages(program(algorithm("ring", "all_reduce", 3)), 0, 0)
    assert found == (Stage((), (), ()),) * 4


def test_blocks_of_all_to_all_must_be_equal():
    made = program(algorithm("pairwise", "all_to_all", 3))
    with pytest.raises(ConfigError, match="expected a multiple of 6 elements"):
        stages(made, 0, 10)
