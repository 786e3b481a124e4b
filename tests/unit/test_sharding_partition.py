"""Cuts of flat vectors own each element once; ranges of elements are boxes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.parallel.sharding.layouts import Bytes, layouts_of
from braid.parallel.sharding.partition import ALIGN, assign_owners, boxes_of, by_elements, by_owners

NUMELS = st.lists(st.integers(0, 200), min_size=1, max_size=6)


@given(NUMELS, st.integers(1, 5), st.booleans())
def test_every_element_is_owned_once(numels, size, whole):
    if whole:
        partition = by_owners(numels, assign_owners(numels, size), size)
    else:
        partition = by_elements(numels, size)
        assert len(set(partition.widths)) == 1
    for index, numel in enumerate(numels):
        owned = [partition.pieces(rank)[index] for rank in range(size)]
        elements = [e for piece in owned for e in range(piece.begin, piece.end)]
        assert sorted(elements) == list(range(numel))
        for rank, piece in enumerate(owned):
            if piece.numel:
                place = partition.bounds[rank] + piece.start
                assert place == partition.starts[index] + piece.begin
                assert piece.begin % ALIGN == 0
        if whole:
            assert sum(piece.numel > 0 for piece in owned) <= 1


@given(st.lists(st.integers(0, 4), max_size=3), st.data())
def test_the_boxes_of_a_range_are_its_elements_in_order(shape, data):
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    begin = data.draw(st.integers(0, x.numel()))
    end = data.draw(st.integers(begin, x.numel()))
    parts = []
    for box in boxes_of(shape, begin, end):
        part = x[tuple(slice(o, o + e) for o, e in zip(box.offset, box.extent, strict=True))]
        assert part.numel()
        assert part.reshape(-1)[0] == box.begin
        parts += part.reshape(-1).tolist()
    assert parts == list(range(begin, end))
    assert len(boxes_of(shape, begin, end)) <= max(1, 2 * len(shape) - 1)


def test_layouts_say_what_is_cut_at_each_stage():
    from braid.programs.layout import Mesh

    mesh = Mesh.parse("replica=2,shard=4")
    shown = {stage: tuple(map(str, layouts_of(stage, mesh))) for stage in (1, 2, 3)}
    assert shown == {
        1: ("-", "-", "-", "shard"),
        2: ("-", "-", "shard", "shard"),
        3: ("-", "shard", "shard", "shard"),
    }


def test_bytes_of_mixed_adam_are_those_of_the_paper():
    mixed = Bytes(2, 2, 0, 12)
    assert [mixed.live(stage, 4) for stage in (1, 2, 3)] == [4 + 12 / 4, 2 + 14 / 4, 16 / 4]
