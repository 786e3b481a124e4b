"""The catalogue of collectives: valid on every number of ranks, and right when carried out on numbers."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

from braid.errors import ConfigError
from braid.programs.schedule import collective, from_text, to_text, validate
from braid.programs.schedule.collective import ALGORITHMS, OPERATIONS, Rounds, algorithm, program
from braid.programs.schedule.collective.rounds import carried_out
from braid.programs.schedule.known import RULES, VOCABULARIES

NAMES = sorted(ALGORITHMS)
MODULES = sorted(
    f"{collective.__name__}.{found.name}" for found in pkgutil.iter_modules(collective.__path__)
)
ROOTED = {"broadcast", "reduce", "gather", "scatter"}
BOOK = [(2, 4, 6), (1, 2, 3), (4, 8, 12)]  # the gradients of three workers
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17)


def variants(name: str, operation: str, num_ranks: int) -> Iterator[Rounds]:
    """The algorithm with several roots, and with every row that divides the number of ranks."""
    if name == "hierarchical":
        for row in range(1, num_ranks + 1):
            if num_ranks % row == 0:
                yield algorithm(name, operation, num_ranks, row=row)
    elif operation in ROOTED:
        for root in sorted({0, num_ranks // 2, num_ranks - 1}):
            yield algorithm(name, operation, num_ranks, root=root)
    else:
        yield algorithm(name, operation, num_ranks)


def check(name: str, operation: str, sizes: range) -> None:
    made = [one for num_ranks in sizes for one in variants(name, operation, num_ranks)]
    wrong = [(one, validate(program(one), RULES)) for one in made]
    assert [(one, found) for one, found in wrong if found] == []
    assert {1, 16} <= {one.num_ranks for one in made}


@pytest.mark.parametrize(("name", "operation"), NAMES)
def test_every_algorithm_is_valid_on_1_to_17_ranks(name: str, operation: str) -> None:
    check(name, operation, range(1, 18))


@pytest.mark.proof
@pytest.mark.parametrize(("name", "operation"), NAMES)
def test_every_algorithm_is_valid_on_up_to_40_ranks(name: str, operation: str) -> None:
    check(name, operation, range(1, 41))


def test_every_operation_has_an_algorithm() -> None:
    assert {operation for _, operation in ALGORITHMS} == set(OPERATIONS)


@pytest.mark.parametrize("module", MODULES)
def test_the_doctests_of_a_module_are_right(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_the_files_of_algorithms_for_all_reduce_show_the_worked_example() -> None:
    shown = {
        module.rpartition(".")[2]
        for module in MODULES
        if doctest.testmod(importlib.import_module(module)).attempted
    }
    assert {"ring", "grid", "exchange", "tree", "naive"} <= shown


# What is carried out, against what anybody would write down. Every number tells whose it is and where it stood.


def numbers(num_ranks: int, length: int) -> list[tuple[int, ...]]:
    return [tuple(100 * rank + i + 1 for i in range(length)) for rank in range(num_ranks)]


def cut(whole: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    size = len(whole) // parts
    return [whole[i * size : (i + 1) * size] for i in range(parts)]


def only(own: tuple[int, ...], rank: int, num_ranks: int) -> tuple[int | None, ...]:
    """The buffer of a rank that has its own block, and nothing where the others' will be."""
    size = len(own)
    return (None,) * (rank * size) + own + (None,) * ((num_ranks - 1 - rank) * size)


def summed(buffers: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*buffers, strict=True)))


def all_of(name: str, operation: str) -> list[Rounds]:
    return [made for p in SIZES for made in variants(name, operation, p)]


def of(operation: str) -> Any:
    return pytest.mark.parametrize("name", [n for n, op in NAMES if op == operation])


@of("all_reduce")
def test_all_reduce_of_the_worked_example(name: str) -> None:
    done = [carried_out(made, BOOK) for made in variants(name, "all_reduce", 3)]
    assert done == [[(7, 14, 21)] * 3 for _ in done]
    assert done


@of("all_reduce")
def test_all_reduce_adds_everybodys_numbers_up_where_blocks_are_not_equal(name: str) -> None:
    for made in all_of(name, "all_reduce"):
        buffers = numbers(made.num_ranks, 2 * made.num_ranks + 1)
        assert carried_out(made, buffers) == [summed(buffers)] * made.num_ranks, made


@of("reduce")
def test_reduce_adds_up_at_the_root(name: str) -> None:
    for made in all_of(name, "reduce"):
        buffers = numbers(made.num_ranks, 5)
        assert carried_out(made, buffers)[made.root] == summed(buffers), made


@of("reduce_scatter")
def test_reduce_scatter_leaves_the_sum_of_block_r_on_rank_r(name: str) -> None:
    for made in all_of(name, "reduce_scatter"):
        p = made.num_ranks
        buffers = numbers(p, 2 * p)
        done = carried_out(made, buffers)
        assert [cut(done[r], p)[r] for r in range(p)] == cut(summed(buffers), p), made


@of("broadcast")
def test_broadcast_gives_everybody_the_buffer_of_the_root(name: str) -> None:
    for made in all_of(name, "broadcast"):
        buffers = numbers(made.num_ranks, 3)
        assert carried_out(made, buffers) == [buffers[made.root]] * made.num_ranks, made


@of("scatter")
def test_scatter_leaves_block_r_of_the_root_on_rank_r(name: str) -> None:
    for made in all_of(name, "scatter"):
        p = made.num_ranks
        buffers = numbers(p, 2 * p)
        done = carried_out(made, buffers)
        assert [cut(done[r], p)[r] for r in range(p)] == cut(buffers[made.root], p), made


@of("gather")
def test_gather_brings_every_block_to_the_root(name: str) -> None:
    for made in all_of(name, "gather"):
        p = made.num_ranks
        own = numbers(p, 2)
        done = carried_out(made, [only(own[r], r, p) for r in range(p)])
        assert done[made.root] == sum(own, ()), made


@of("all_gather")
def test_all_gather_brings_every_block_to_everybody(name: str) -> None:
    for made in all_of(name, "all_gather"):
        p = made.num_ranks
        own = numbers(p, 2)
        done = carried_out(made, [only(own[r], r, p) for r in range(p)])
        assert done == [sum(own, ())] * p, made


@of("all_to_all")
def test_all_to_all_makes_block_j_of_rank_i_block_i_of_rank_j(name: str) -> None:
    for made in all_of(name, "all_to_all"):
        p = made.num_ranks
        sent = numbers(p, 2 * p)
        done = carried_out(made, [buffer + (None,) * (2 * p) for buffer in sent])
        assert [cut(both, 2)[1] for both in done] == [
            sum((cut(sent[i], p)[j] for i in range(p)), ()) for j in range(p)
        ], made


# Shapes: rounds, and text that comes back.


@pytest.mark.parametrize(("name", "operation"), NAMES)
def test_every_algorithm_comes_back_from_its_text(name: str, operation: str) -> None:
    for num_ranks in (1, 2, 5, 8):
        for made in variants(name, operation, num_ranks):
            written = program(made)
            assert from_text(to_text(written), VOCABULARIES) == written


def test_numbers_of_rounds_are_those_of_the_books() -> None:
    rounds = {
        f"{name} {operation}": [algorithm(name, operation, p, row=4).num_rounds for p in (4, 8, 64)]
        for name, operation in NAMES
        if operation in {"all_reduce", "all_to_all", "all_gather"}
    }
    assert rounds == {
        "bruck all_gather": [2, 3, 6],
        "bruck all_to_all": [2, 3, 6],
        "doubling all_reduce": [2, 3, 6],
        "halving_doubling all_reduce": [4, 6, 12],
        "hierarchical all_reduce": [6, 8, 36],
        "hypercube all_gather": [2, 3, 6],
        "naive all_gather": [6, 14, 126],
        "naive all_reduce": [6, 14, 126],
        "pairwise all_gather": [3, 7, 63],
        "pairwise all_to_all": [3, 7, 63],
        "ring all_gather": [3, 7, 63],
        "ring all_reduce": [6, 14, 126],
        "torus all_reduce": [4, 8, 28],
        "tree all_reduce": [4, 6, 12],
    }


def test_ring_sends_what_no_all_reduce_can_do_without_from_every_rank() -> None:
    written = program(algorithm("ring", "all_reduce", 8))
    sends = [sum(action.kind == "send" for action in actions) for actions in written.ranks]
    assert sends == [2 * 7] * 8  # of an eighth each: 2 (p-1)/p l
    assert str(written) == "ring all_reduce on 8 ranks, 112 sends"


# Refusals.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"name": "tree", "operation": "all_gather", "num_ranks": 4},
            (
                "tree is not an algorithm for all_gather (but for all_reduce, broadcast, gather, reduce, scatter): "
                "choose one of bruck, hypercube, naive, pairwise, ring"
            ),
        ),
        (
            {"name": "magic", "operation": "all_to_all", "num_ranks": 4},
            "magic is not an algorithm for all_to_all: choose one of bruck, pairwise",
        ),
        (
            {"name": "bruck", "operation": "dance", "num_ranks": 4},
            "bruck is not an algorithm for dance (but for all_gather, all_to_all): unknown operation",
        ),
        (
            {"name": "hierarchical", "operation": "all_reduce", "num_ranks": 4},
            "hierarchical needs the number of ranks of a host: pass it as row",
        ),
        (
            {"name": "hierarchical", "operation": "all_reduce", "num_ranks": 4, "row": 3},
            "4 ranks cannot be divided into rows of 3: use a divisor of 4",
        ),
        (
            {"name": "tree", "operation": "broadcast", "num_ranks": 4, "root": 4},
            "root must be 0 to 3, got 4",
        ),
        (
            {"name": "naive", "operation": "gather", "num_ranks": 4, "root": -1},
            "root must be 0 to 3, got -1",
        ),
        (
            {"name": "tree", "operation": "all_reduce", "num_ranks": 0},
            "at least 1 rank is needed, got 0",
        ),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(
    call: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        algorithm(**call)
    assert str(raised.value) == message
