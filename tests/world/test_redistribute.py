"""Tensors in another layout are bitwise the slices of the whole tensor, on one mesh and between meshes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.comm.mesh_groups import MeshGroups
from braid.comm.redistribute import carry_out, move, plan, redistribute
from braid.comm.redistribute.exchange import Exchange
from braid.errors import ConfigError
from braid.programs.layout import Layout, Mesh
from layouts import SIZES, layouts, meshes, moves
from support.worlds import run_threads

DTYPES = [torch.float32, torch.int64]


def contribution(shape, dtype, coordinates, seed):
    """The whole tensor, of which each index along a partial axis has its own."""
    generator = torch.Generator().manual_seed(hash((seed, *sorted(coordinates.items()))) % 2**40)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randint(-(2**40), 2**40, shape, dtype=dtype, generator=generator)


def summed(mesh, axes, coordinates, make):
    """Sum in the order of ranks along axes, the last one first."""
    if not axes:
        return make(coordinates)
    first, *rest = axes
    terms = [summed(mesh, rest, {**coordinates, first: k}, make) for k in range(mesh.axes[first])]
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def part(whole, layout, rank):
    return whole[tuple(slice(*bounds) for bounds in layout.box(whole.shape, rank))]


def number_of(text):
    return sum((index + 1) * ord(letter) for index, letter in enumerate(text))


def wholes(case, dtype, mesh, rank):
    """The tensors of which a rank holds parts before and afterwards."""
    shape, source, target = case

    def make(coordinates):
        own = {tuple(mesh.axes).index(axis): coordinates[axis] for axis in source.partial}
        return contribution(shape, dtype, own, number_of(str(source)))

    here = mesh.coordinates(rank)
    axes = [axis for axis in source.partial if axis not in target.partial]
    return make(here), summed(mesh, axes, here, make)


def same_bits(x, expected):
    return x.dtype == expected.dtype and x.shape == expected.shape and torch.equal(x, expected)


def redistributes(group, mesh, cases):
    groups = MeshGroups(mesh, group)
    wrong = []
    for case, dtype in cases:
        shape, source, target = case
        before, after = wholes(case, dtype, mesh, group.rank)
        x = part(before, source, group.rank)
        kept = x.clone()
        y = redistribute(x, source, target, groups.__getitem__, shape=shape)
        if not same_bits(y, part(after, target, group.rank)) or not torch.equal(x, kept):
            wrong.append((str(mesh), shape, str(source), str(target), dtype))
    return wrong


@given(data=st.data())
def test_any_two_layouts_on_one_mesh(data):
    mesh = data.draw(meshes())
    cases = data.draw(
        st.lists(st.tuples(moves(mesh), st.sampled_from(DTYPES)), min_size=4, max_size=10)
    )
    assert run_threads(mesh.size, redistributes, mesh, cases) == [[]] * mesh.size


def moves_between(group, cases):
    wrong = []
    for shape, source, target, source_ranks, target_ranks, dtype in cases:
        whole = contribution(shape, dtype, {}, number_of(str(source)))
        x = torch.empty(0, dtype=dtype)
        if group.rank in source_ranks:
            x = part(whole, source, source_ranks.index(group.rank))
        y = move(
            x,
            source,
            target,
            group,
            shape=shape,
            source_ranks=source_ranks,
            target_ranks=target_ranks,
        )
        if group.rank not in target_ranks:
            fits = y is None
        else:
            fits = same_bits(y, part(whole, target, target_ranks.index(group.rank)))
        if not fits:
            wrong.append((shape, str(source), str(target), source_ranks, target_ranks, dtype))
    return wrong


@st.composite
def moves_between_meshes(draw, size):
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    both = [draw(meshes().filter(lambda mesh: mesh.size <= size)) for _ in range(2)]
    source, target = (draw(layouts(mesh, len(shape))) for mesh in both)
    ranks = [tuple(draw(st.permutations(range(size)))[: mesh.size]) for mesh in both]
    return shape, source, target, *ranks, draw(st.sampled_from(DTYPES))


@given(data=st.data())
def test_any_two_layouts_on_any_two_meshes(data):
    size = data.draw(st.integers(1, 8))
    cases = data.draw(st.lists(moves_between_meshes(size), min_size=4, max_size=10))
    assert run_threads(size, moves_between, cases) == [[]] * size


@given(data=st.data())
def test_exactly_the_elements_that_a_receiver_lacks_are_sent_once(data):
    size = data.draw(st.integers(1, 8))
    shape, source, target, source_ranks, target_ranks, _ = data.draw(moves_between_meshes(size))
    parts = Exchange(shape, source, target, source_ranks, target_ranks, size)
    sent = sorted((rank, *item) for rank in range(size) for item in parts.sent(rank))
    received = sorted(
        (peer, rank, box) for rank in range(size) for peer, box in parts.received(rank)
    )
    assert sent == received
    for rank in range(size):
        whole = parts.target_box(rank)
        volume = sum(volume_of(box) for _, box in parts.received(rank))
        assert volume == (volume_of(whole) if whole is not None else 0)
        if whole is not None and whole == parts.source_box(rank):
            assert {peer for peer, _ in parts.received(rank)} <= {rank}


def volume_of(box):
    return math.prod(end - begin for begin, end in box)


def test_replicas_share_the_receivers():
    pair, four = Mesh({"dp": 2}), Mesh({"tp": 4})
    parts = Exchange(
        (8,), Layout.parse(pair, "-"), Layout.parse(four, "tp"), (0, 1), (2, 3, 4, 5), 6
    )
    assert list(parts.sent(0)) == [(2, ((0, 2),)), (4, ((4, 6),))]
    assert list(parts.sent(1)) == [(3, ((2, 4),)), (5, ((6, 8),))]


def nested_uneven(group):
    """A (5, 3) tensor that two axes split along dim 0, of which DTensor returns wrong elements."""
    mesh = Mesh({"dp": 2, "tp": 2})
    source, target = Layout.parse(mesh, "dp,tp | -"), Layout.parse(mesh, "- | -")
    whole = torch.arange(15).view(5, 3)
    groups = MeshGroups(mesh, group)
    x = part(whole, source, group.rank)
    return redistribute(x, source, target, groups.__getitem__, shape=(5, 3)).tolist()


def test_nested_uneven_parts_are_gathered_in_order(world):
    assert world(4, nested_uneven) == [torch.arange(15).view(5, 3).tolist()] * 4


def without_elements(group):
    mesh = Mesh({"tp": 2})
    source, target = Layout.parse(mesh, "tp | -"), Layout.parse(mesh, "- | -")
    groups = {"tp": group}.__getitem__
    x = redistribute(torch.empty(2 - group.rank, 0), source, target, groups, shape=(3, 0))
    whole = Layout.parse(Mesh({"tp": 1}), "- | -")
    y = move(x if group.rank == 0 else torch.empty(0), whole, source, group, shape=(3, 0))
    return list(x.shape), list(y.shape)


def test_tensors_without_elements_keep_their_shapes():
    assert run_threads(2, without_elements) == [([3, 0], [2, 0]), ([3, 0], [1, 0])]


def refused(call, group):
    try:
        call(group)
    except ConfigError as exc:
        return str(exc)
    return None


def wrong_part(group):
    mesh = Mesh({"tp": 2})
    source, target = Layout.parse(mesh, "tp"), Layout.parse(mesh, "-")
    redistribute(torch.zeros(5), source, target, {"tp": group}.__getitem__, shape=(7,))


def wrong_group(group):
    mesh = Mesh({"tp": 4})
    redistribute(
        torch.zeros(2),
        Layout.parse(mesh, "tp"),
        Layout.parse(mesh, "-"),
        {"tp": group}.__getitem__,
        shape=(8,),
    )


def wrong_itemsize(group):
    mesh = Mesh({"tp": 2})
    steps = plan((8,), 4, Layout.parse(mesh, "tp"), Layout.parse(mesh, "-"))
    carry_out(steps, torch.zeros(4, dtype=torch.float64), {"tp": group}.__getitem__)


def wrong_ranks(group):
    mesh = Mesh({"tp": 2})
    source, target = Layout.parse(mesh, "tp"), Layout.parse(mesh, "- | -")
    move(torch.zeros(4), source, target, group, shape=(8,), target_ranks=(0, 5))


def wrong_sender(group):
    one = Mesh({"tp": 1})
    layout = Layout.parse(one, "-")
    move(torch.zeros(8), layout, layout, group, shape=(8,))


def partial_move(group):
    mesh = Mesh({"tp": 2})
    move(
        torch.zeros(8),
        Layout.parse(mesh, "- ; partial tp"),
        Layout.parse(mesh, "-"),
        group,
        shape=(8,),
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            wrong_part,
            "rank 0 of the mesh tp=2 has a shard of shape [4] in layout tp, but passed one of shape [5]",
        ),
        (wrong_group, "axis tp of tp=4 has 4 ranks, but its group has 2"),
        (wrong_itemsize, "elements of 8 bytes (torch.float64), but the plan is for 4"),
        (
            wrong_ranks,
            "the target layout - | - has 2 dims, but the tensor's shape [8] has 1: use one entry per dim; the target mesh tp=2 needs 2 different ranks from 0 to 1, got [0, 5]",
        ),
        (
            partial_move,
            "the source layout - ; partial tp is partial: redistribute to one without partial axes",
        ),
    ],
)
def test_mistakes_are_named(call, text):
    first, _ = run_threads(2, partial(refused, call))
    assert text in (first or "")


def test_a_rank_without_a_part_passes_an_empty_tensor():
    with pytest.raises(
        ConfigError,
        match=r"group rank 1 is not in the source mesh tp=1 \(its ranks are \[0\]\), but passed",
    ):
        run_threads(2, wrong_sender)
