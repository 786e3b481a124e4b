"""Plans between layouts are the cheapest ones, can be read, and refuse layouts that do not fit together."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.comm.redistribute import AxisCost, plan, planner
from braid.errors import ConfigError
from braid.programs.layout import Layout, Mesh, layout
from layouts import inferred_seconds, meshes, moves

MESH = Mesh({"dp": 2, "tp": 4})
COST = st.builds(
    AxisCost,
    latency_s=st.sampled_from([0.0, 1e-6, 1e-4]),
    s_per_byte=st.sampled_from([0.0, 1e-10, 1e-7]),
)


def moves_of(shape, source, target, mesh=MESH, **costs):
    steps = plan(shape, 4, Layout.parse(mesh, source), Layout.parse(mesh, target), costs).steps
    return [(step.move, step.axis) for step in steps]


@given(data=st.data())
def test_no_plan_costs_more_than_an_inference_by_rules(data):
    mesh = data.draw(meshes().filter(lambda mesh: min(mesh.axes.values()) > 1))
    costs = {axis: data.draw(COST) for axis in mesh.axes}
    for shape, source, target in data.draw(st.lists(moves(mesh), min_size=8, max_size=12)):
        best = plan(shape, 4, source, target, costs)
        by_rules = inferred_seconds(shape, 4, source, target, costs)
        assert best.seconds <= by_rules * (1 + 1e-9)
        assert (best.steps[-1].layout if best.steps else source) == target


def test_of_ways_that_cost_nothing_the_one_with_the_fewest_steps_is_taken():
    free = AxisCost(latency_s=0.0, s_per_byte=0.0)
    assert moves_of((8, 8), "tp | -", "- | tp", tp=free) == [("all_to_all", "tp")]
    assert moves_of((8, 8), "- | - ; partial tp", "- | -", tp=free) == [("all_reduce", "tp")]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("tp | -", "tp | -", []),
        ("tp | -", "- | -", [("all_gather", "tp")]),
        ("- | -", "- | tp", [("slice", "tp")]),
        ("tp | -", "- | tp", [("all_to_all", "tp")]),
        ("- | tp", "tp | -", [("all_to_all", "tp")]),
        ("- | - ; partial tp", "- | -", [("all_reduce", "tp")]),
        ("- | - ; partial tp", "- | tp", [("reduce_scatter", "tp")]),
        (
            "dp,tp | -",
            "tp,dp | -",
            [("all_gather", "tp"), ("all_gather", "dp"), ("slice", "tp"), ("slice", "dp")],
        ),
        ("dp | - ; partial tp", "- | dp ; partial tp", [("all_to_all", "dp")]),
    ],
)
def test_each_change_of_one_axis_is_one_step(source, target, expected):
    assert moves_of((64, 64), source, target) == expected


def test_a_product_of_rows_feeds_one_of_columns_by_a_single_gather():
    """OpenMLSys: MatMul split ((4,1),(1,1)) leaves rows, MatMul split ((1,1),(1,4)) takes whole rows."""
    mesh = Mesh({"tp": 4})
    assert moves_of((8, 8), "tp | -", "- | -", mesh) == [("all_gather", "tp")]


def test_replicas_on_a_quick_axis_save_bytes_on_a_slow_one():
    slow, quick = AxisCost(s_per_byte=1e-7), AxisCost(s_per_byte=1e-11)
    assert moves_of((1024, 1024), "dp | -", "- | -", dp=slow, tp=quick) == [
        ("slice", "tp"),
        ("all_gather", "dp"),
        ("all_gather", "tp"),
    ]


def test_partial_axes_are_summed_from_the_last_one_of_the_mesh_whatever_they_cost():
    for slow in ("dp", "tp"):
        steps = moves_of(
            (64, 64), "- | - ; partial dp,tp", "- | -", **{slow: AxisCost(s_per_byte=1e-6)}
        )
        assert [axis for move, axis in steps if "reduce" in move] == ["tp", "dp"]


def test_the_readme_shows_the_table_of_its_plan():
    source, target = Layout.parse(MESH, "dp | - ; partial tp"), Layout.parse(MESH, "- | tp")
    readme = Path(planner.__file__).with_name("README.md").read_text()
    assert plan((64, 64), 4, source, target).explain() in readme


@pytest.mark.parametrize("module", [layout, planner])
def test_examples_in_docstrings_are_right(module):
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)


def test_axes_of_one_rank_need_no_step():
    mesh = Mesh({"dp": 1, "tp": 2})
    assert moves_of((5, 3), "dp,tp | -", "tp | dp", mesh) == []
    assert moves_of((5, 3), "tp | -", "tp | - ; partial dp", mesh) == []


def test_a_plan_is_a_table():
    steps = plan(
        (4, 6), 4, Layout.parse(MESH, "tp | - ; partial dp"), Layout.parse(MESH, "- | tp,dp")
    )
    assert (
        "\n" + steps.explain()
        == """
step            axis  dims    bytes    us  layout
                                           tp | - ; partial dp
all_to_all      tp    0 -> 1     24  20.0  - | tp ; partial dp
reduce_scatter  dp    -> 1       16  20.0  - | tp,dp"""
    )
    assert (steps.nbytes, round(steps.seconds, 6)) == (40, 40e-6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: plan(
                (4,),
                0,
                Layout.parse(MESH, "tp | -"),
                Layout.parse(MESH, "- ; partial tp"),
                {"cp": AxisCost()},
            ),
            r"the source layout tp \| - has 2 dims, but the shape \[4\] has 1: use one entry per dim; sizes must not be negative, .* 0 bytes; the target - ; partial tp is partial over tp, .*; costs has cp",
        ),
        (
            lambda: plan(
                (4,), 4, Layout.parse(MESH, "tp"), Layout.parse(Mesh({"tp": 4, "dp": 2}), "tp")
            ),
            "the source is on the mesh dp=2,tp=4, but the target is on tp=4,dp=2: use move",
        ),
        (lambda: AxisCost(latency_s=-1.0), "at least 0, got AxisCost"),
    ],
)
def test_mistakes_are_named(make, text):
    with pytest.raises(ConfigError, match=text):
        make()
