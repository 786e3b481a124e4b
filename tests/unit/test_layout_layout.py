"""A layout divides a tensor among the ranks of a mesh, exactly and refined by each inner axis."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.programs.layout import Layout, Mesh

MESH = Mesh({"dp": 2, "tp": 2, "cp": 3})


@st.composite
def layouts(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = Mesh(dict(zip(("a", "b", "c"), sizes, strict=False)))
    dims = [[] for _ in range(draw(st.integers(0, 3)))]
    partial = []
    for axis in draw(st.permutations(list(mesh.axes))):
        draw(st.sampled_from([*dims, partial, []])).append(axis)
    return Layout(mesh, tuple(map(tuple, dims)), tuple(partial))


@given(layout=layouts(), data=st.data())
def test_boxes_hold_each_element_once_per_replica_and_differ_by_one_at_most(layout, data):
    shape = data.draw(st.tuples(*(st.integers(0, 13) for _ in layout.dims)))
    boxes = [layout.box(shape, rank) for rank in range(layout.mesh.size)]
    ways = math.prod(layout.mesh.axes[axis] for axes in layout.dims for axis in axes)
    copies = layout.mesh.size // ways
    volume = sum(math.prod(end - begin for begin, end in box) for box in boxes)
    assert volume == copies * math.prod(shape)
    for dim, axes in enumerate(layout.dims):
        parts = sorted({box[dim] for box in boxes})
        covered = [index for begin, end in parts for index in range(begin, end)]
        assert covered == list(range(shape[dim]))
        if len(axes) == 1:
            sizes = [end - begin for begin, end in (box[dim] for box in boxes)]
            assert max(sizes) - min(sizes) <= 1


@given(layout=layouts(), data=st.data())
def test_one_more_inner_axis_refines_the_parts(layout, data):
    used = {axis for axes in (*layout.dims, layout.partial) for axis in axes}
    free = [axis for axis in layout.mesh.axes if axis not in used]
    if not layout.dims or not free:
        return
    dim = data.draw(st.integers(0, len(layout.dims) - 1))
    shape = data.draw(st.tuples(*(st.integers(0, 13) for _ in layout.dims)))
    dims = list(layout.dims)
    dims[dim] = (*dims[dim], free[0])
    finer = Layout(layout.mesh, tuple(dims), layout.partial)
    for rank in range(layout.mesh.size):
        peers = layout.mesh.peers(free[0], rank)
        parts = [finer.box(shape, peer)[dim] for peer in peers]
        assert [(parts[0][0], parts[-1][1])] == [layout.box(shape, rank)[dim]]
        assert [end for _, end in parts[:-1]] == [begin for begin, _ in parts[1:]]
        sizes = [end - begin for begin, end in parts]
        assert sizes == sorted(sizes, reverse=True)


@given(layout=layouts())
def test_text_and_layout_are_inverse(layout):
    assert Layout.parse(layout.mesh, str(layout)) == layout


def test_nested_uneven_parts_are_divided_axis_by_axis():
    layout = Layout.parse(Mesh.parse("dp=2,tp=2"), "dp,tp | -")
    assert [layout.box((5, 3), rank) for rank in range(4)] == [
        ((0, 2), (0, 3)),
        ((2, 3), (0, 3)),
        ((3, 4), (0, 3)),
        ((4, 5), (0, 3)),
    ]


def test_packed_blocks_are_each_divided_and_have_no_box():
    layout = Layout.parse(MESH, "3*tp | - ; varying dp")
    assert str(layout) == "3*tp | - ; varying dp"
    assert (layout.blocks, layout.varying) == ((3, 1), ("dp",))
    first, second = (layout.pieces((12, 2), rank) for rank in (0, 3))
    assert first == (((0, 2), (0, 2)), ((4, 6), (0, 2)), ((8, 10), (0, 2)))
    assert second == (((2, 4), (0, 2)), ((6, 8), (0, 2)), ((10, 12), (0, 2)))
    plain = Layout.parse(MESH, "1*tp | -")
    assert (str(plain), plain.pieces((4, 2), 0)) == ("tp | -", (((0, 2), (0, 2)),))
    with pytest.raises(
        ConfigError, match="has packed blocks, so a rank's shard is not one contiguous slice"
    ):
        layout.box((12, 2), 0)
    with pytest.raises(
        ConfigError, match=r"shape \[11, 2\] cannot be divided into the packed blocks"
    ):
        layout.pieces((11, 2), 0)
    with pytest.raises(ConfigError, match="blocks \\(2,\\) does not match the dims"):
        Layout(MESH, ((), ()), (), (), (2,))
    with pytest.raises(ConfigError, match="is named 2 times, and splits one dim, is partial or"):
        Layout.parse(MESH, "tp | - ; varying tp")


def test_text_names_dims_in_order_and_partial_axes_in_the_order_of_the_mesh():
    layout = Layout(MESH, ((), ("tp",)), ("cp", "dp"))
    assert (str(layout), layout.partial) == ("- | tp ; partial dp,cp", ("dp", "cp"))
    assert Layout.parse(MESH, " -|tp;  partial cp , dp ") == layout
    assert str(Layout(MESH, ())) == "scalar"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Layout(MESH, (("dp", "xp"), ("dp",)), ("dp",)),
            "the mesh dp=2,tp=2,cp=3 has no axis xp; axis dp is named 3 times",
        ),
        (
            lambda: Layout(MESH, ("dp", ())),
            r"dim 0 is 'dp': write a tuple of axes, such as \('dp',\)",
        ),
        (lambda: Layout(MESH, ((),), "dp"), "partial is 'dp'"),
        (
            lambda: Layout.parse(MESH, "dp |"),
            r"a layout is written as 'dp,tp \| 3\*tp \| - ; partial cp ; varying ep'.* got 'dp \|'",
        ),
        (lambda: Layout.parse(MESH, "dp ; sum tp"), "got 'dp ; sum tp'"),
        (lambda: Layout.parse(MESH, "dp ; partial"), "got 'dp ; partial'"),
        (
            lambda: Layout.parse(MESH, "dp | -").box((3,), 0),
            r"layout dp \| - has 2 dims, but shape \[3\] has 1",
        ),
        (lambda: Layout.parse(MESH, "dp").box((3,), 12), "rank 12 is not in a mesh of 12 ranks"),
    ],
)
def test_mistakes_are_named(make, text):
    with pytest.raises(ConfigError, match=text):
        make()
