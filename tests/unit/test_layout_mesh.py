"""A mesh counts ranks along its last axis first, and refuses what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.programs.layout import Mesh

AXES = st.dictionaries(
    st.from_regex(r"[a-z]{1,3}", fullmatch=True), st.integers(1, 4), min_size=1, max_size=4
)


@given(axes=AXES)
def test_coordinates_and_ranks_are_inverse(axes):
    mesh = Mesh(axes)
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.size)] == list(
        range(mesh.size)
    )
    assert Mesh.parse(str(mesh)) == mesh


@given(axes=AXES, data=st.data())
def test_peers_along_axes_divide_the_ranks(axes, data):
    mesh = Mesh(axes)
    some = data.draw(st.lists(st.sampled_from(sorted(axes)), unique=True))
    groups = {mesh.peers(some, rank) for rank in range(mesh.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        here = mesh.coordinates(group[0])
        rest = [name for name in axes if name not in some]
        assert all(mesh.coordinates(r)[name] == here[name] for r in group for name in rest)


def test_neighbours_differ_along_the_last_axis():
    mesh = Mesh.parse("pp=2, dp=3")
    assert (mesh.size, mesh.coordinates(4), mesh.rank({"pp": 1})) == (6, {"pp": 1, "dp": 1}, 3)
    assert (mesh.peers("dp", 4), mesh.peers(["pp"], 4), mesh.peers([], 4)) == (
        (3, 4, 5),
        (1, 4),
        (4,),
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Mesh({}), "a mesh needs at least one axis"),
        (lambda: Mesh({"PP": 2, "dp": 0}), "'PP' is not an axis name, such as dp; axis dp must have at least 1 rank, got 0"),
        (lambda: Mesh({"dp": True}), "got True"),
        (lambda: Mesh.parse("pp=2,pp=3"), "each axis once"),
        (lambda: Mesh.parse("pp"), "a mesh is written as pp=2,dp=4"),
        (lambda: Mesh.parse("pp=-1"), "a mesh is written as"),
        (lambda: Mesh({"dp": 2}).coordinates(2), "rank 2 is not in a mesh of 2 ranks"),
        (lambda: Mesh({"dp": 2}).peers("tp", 0), "the mesh dp=2 has no axis tp"),
        (lambda: Mesh({"dp": 2}).rank({"dp": 2}), "axis dp has only the indices 0 to 1, got 2"),
    ],
)  # fmt: skip
def test_what_is_no_mesh_or_not_in_it_is_refused(make, text):
    with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
        make()


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(sizes=SIZES, data=st.data())
def test_views_by_splits_and_joins_have_the_same_ranks_in_the_same_order(sizes, data):
    mesh = Mesh({f"a{number}": size for number, size in enumerate(sizes)})
    first = data.draw(st.integers(0, len(sizes) - 1))
    last = data.draw(st.integers(first, len(sizes) - 1))
    names = [f"a{number}" for number in range(first, last + 1)]
    joined = mesh.join(names, "all")
    assert {joined.peers("all", rank) for rank in range(mesh.size)} == {
        mesh.peers(names, rank) for rank in range(mesh.size)
    }
    again = joined.split("all", {name: mesh.axes[name] for name in names})
    assert list(again.axes.items()) == list(mesh.axes.items())
    assert mesh.view(joined.axes) == joined
    assert joined.view(str(mesh)) == mesh


@given(axes=AXES, data=st.data())
def test_a_view_is_made_of_splits_and_joins_or_refused(axes, data):
    """By definition: some finer mesh has the axes of both as runs of its own."""
    mesh = Mesh(axes)
    divisors = [d for d in range(1, mesh.size + 1) if mesh.size % d == 0]
    outer = data.draw(st.sampled_from(divisors))
    other = {"outer": outer, "inner": mesh.size // outer}
    blocks = [1]
    for size in reversed(list(axes.values())):
        blocks.append(blocks[-1] * size)
    fits = all(b % other["inner"] == 0 or other["inner"] % b == 0 for b in blocks)
    if fits:
        assert mesh.view(other) == Mesh(other)
    else:
        with pytest.raises(ConfigError, match="cuts across"):
            mesh.view(other)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda mesh: mesh.view("ep=4"), "ep=4 has 4 ranks, but pp=2,dp=3,tp=4 has 24"),
        (lambda mesh: mesh.view("a=8,b=3"), "a=8,b=3 cuts across pp=2,dp=3,tp=4: blocks of 3 and of 4 ranks"),
        (lambda mesh: mesh.split("dp", "a=2,b=2"), "axis dp has 3 ranks, but the axes a=2,b=2 have 4: choose sizes whose product is 3"),
        (lambda mesh: mesh.split("dp", "tp=3"), "already has an axis tp"),
        (lambda mesh: mesh.split("ep", "a=2"), "has no axis ep"),
        (lambda mesh: mesh.join(["pp", "tp"], "x"), "axes pp, tp are not adjacent in pp=2,dp=3,tp=4"),
        (lambda mesh: mesh.join(["tp", "dp"], "x"), "in their order"),
        (lambda mesh: mesh.join([], "x"), "axes none are not adjacent"),
        (lambda mesh: mesh.join(["dp", "tp"], "pp"), "already has an axis pp"),
    ],
)  # fmt: skip
def test_what_is_no_view_is_refused_with_its_sizes(make, text):
    with pytest.raises(ConfigError, match=text):
        make(Mesh.parse("pp=2,dp=3,tp=4"))
