"""PipeDream's text, its states and its two programs, against its results and all partitions."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.cli import main
from braid.errors import ConfigError
from braid.plan.pipedream import (
    MachineLevel,
    MemoryLimit,
    ProfiledGraph,
    ProfiledNode,
    format_graph,
    parse_graph,
    partition,
    states_of,
)

DATA = Path(__file__).parents[1] / "data" / "pipedream"
LINE = (
    "node1 -- Linear(3, 3) -- forward_compute_time=1.000, backward_compute_time=2.000, "
    "activation_size=12.000, parameter_size=36.000"
)


def profile(name: str) -> ProfiledGraph:
    return parse_graph((DATA / f"{name}.graph.txt").read_text())


def chain(seconds, outputs, params) -> ProfiledGraph:
    names = [f"n{index}" for index in range(len(seconds))]
    nodes = {
        name: ProfiledNode(name, "Layer", s, 2 * s, o, p)
        for name, s, o, p in zip(names, seconds, outputs, params, strict=True)
    }
    return ProfiledGraph(nodes, {a: (b,) for a, b in itertools.pairwise(names)} | {names[-1]: ()})


@pytest.mark.parametrize(
    ("name", "machines", "bandwidth", "straight", "seconds", "replicas"),
    [
        ("vgg16", 4, 1e9, False, 0.205520896, [3, 1]),
        ("vgg16", 8, 1e9, False, 0.1038331703, [7, 1]),
        ("vgg16", 16, 1e9, False, 0.0565297674, [13, 2, 1]),
        ("vgg16", 4, 1e9, True, 0.411041792, [1, 1, 1, 1]),
        ("gnmt", 4, 10e9, True, 0.025868, [1, 1, 1, 1]),
    ],
)
def test_the_released_program_gives_the_published_times(
    name, machines, bandwidth, straight, seconds, replicas
):
    done = partition(
        states_of(profile(name)),
        [MachineLevel(machines, bandwidth)],
        recurrence="released",
        straight=straight,
    )
    assert done.seconds == pytest.approx(seconds, rel=5e-9)
    assert [stage.replicas for stage in done.stages] == replicas


def test_the_released_program_cuts_vgg16_where_it_was_published():
    states = states_of(profile("vgg16"))
    done = partition(states, [MachineLevel(8, 1e9)], recurrence="released")
    assert [(s.first, s.end) for s in done.stages] == [(0, 24), (24, 40)]
    assert frozenset().union(*(stage.nodes for stage in done.stages)) == states.members[-1]


def test_states_of_a_diamond_are_its_antichains():
    text = "\n".join(LINE.replace("node1", name) for name in "abcd")
    graph = parse_graph(text + "\n\ta -- b\n\ta -- c\n\tb -- d\n\tc -- d\n")
    states = states_of(graph)
    assert [set(each) for each in states.members] == [
        {"a"},
        {"a", "b"},
        {"a", "c"},
        {"a", "b", "c"},
        {"a", "b", "c", "d"},
    ]
    assert [set(each) for each in states.handed_on] == [
        {"a"},
        {"a", "b"},
        {"a", "c"},
        {"b", "c"},
        {"d"},
    ]
    assert states.before[4].tolist() == [True, True, True, True, False]
    assert not states.before[2, 1]


def every_pipeline(states, machines, bandwidth):
    """The least time of a minibatch over all partitions of a row, by the paper's words."""
    size = len(states.compute_s)
    best = math.inf
    for count in range(1, min(size, machines) + 1):
        for cuts in itertools.combinations(range(size - 1), count - 1):
            bounds = [-1, *cuts, size - 1]
            for replicas in itertools.product(range(1, machines + 1), repeat=count):
                if sum(replicas) != machines:
                    continue
                times = [2 * states.output_bytes[cut] / bandwidth for cut in cuts]
                for (before, last), m in zip(itertools.pairwise(bounds), replicas, strict=True):
                    compute, params = states.compute_s[last], states.param_bytes[last]
                    if before >= 0:
                        compute = compute - states.compute_s[before]
                        params = params - states.param_bytes[before]
                    times.append(max(compute, 2 * (m - 1) * params / bandwidth) / m)
                best = min(best, max(times))
    return best


@given(
    layers=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)),
        min_size=1,
        max_size=6,
    ),
    machines=st.integers(1, 4),
)
def test_no_pipeline_of_a_row_is_faster_than_the_papers_program_says(layers, machines):
    seconds, outputs, params = (list(column) for column in zip(*layers, strict=True))
    states = states_of(chain(seconds, outputs, params))
    done = partition(states, [MachineLevel(machines, 2.0)])
    assert done.seconds == pytest.approx(every_pipeline(states, machines, 2.0))
    assert done.seconds <= done.data_parallel_s
    assert sum(stage.replicas for stage in done.stages) == machines


ROWS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=5
)


def between(totals, before, last):
    """The sum of what lies after one state up to another."""
    return totals[last] - (totals[before] if before >= 0 else 0)


def best_of_levels(states, first, last, levels):
    """The least time of states first..last on all machines of all levels, by all partitions."""
    *inner, (machines, bandwidth) = levels
    best = math.inf
    for count in range(1, min(last - first + 1, machines) + 1):
        for cuts in itertools.combinations(range(first, last), count - 1):
            bounds = [first - 1, *cuts, last]
            for replicas in itertools.product(range(1, machines + 1), repeat=count):
                if sum(replicas) != machines:
                    continue
                times = [2 * states.output_bytes[cut] / bandwidth for cut in cuts]
                for (before, end), m in zip(itertools.pairwise(bounds), replicas, strict=True):
                    params = between(states.param_bytes, before, end)
                    if inner:
                        compute = best_of_levels(states, before + 1, end, inner)
                    else:
                        compute = between(states.compute_s, before, end)
                    times.append(max(compute, 2 * (m - 1) * params / bandwidth) / m)
                best = min(best, max(times))
    return best


@given(layers=ROWS, inner=st.integers(1, 3), outer=st.integers(1, 3))
def test_levels_of_machines_are_divided_as_well_as_can_be(layers, inner, outer):
    states = states_of(chain(*(list(column) for column in zip(*layers, strict=True))))
    levels = [MachineLevel(inner, 20.0), MachineLevel(outer, 2.0)]
    done = partition(states, levels)
    expected = best_of_levels(states, 0, len(states.compute_s) - 1, levels)
    assert done.seconds == pytest.approx(expected)
    if len(done.stages) == 1:  # data parallel, level by level
        assert done.data_parallel_s == done.seconds
    assert done.seconds <= done.data_parallel_s
    assert [stage.first for stage in done.stages[1:]] == [stage.end for stage in done.stages[:-1]]
    assert (done.stages[0].first, done.stages[-1].end) == (0, len(states.compute_s))


@given(layers=ROWS, machines=st.integers(1, 4), nbytes=st.integers(50, 800))
def test_every_stage_fits_into_memory_and_no_other_pipeline_that_does_is_faster(
    layers, machines, nbytes
):
    graph = chain(*(list(column) for column in zip(*layers, strict=True)))
    states, memory = states_of(graph), MemoryLimit(nbytes, states=1)

    def needed(before, last, replicas, later):
        held = (replicas + later - 1) // replicas + 1
        kept = between(states.saved_bytes, before, last)
        kept += states.output_bytes[before] if before >= 0 else 0
        params = between(states.param_bytes, before, last)
        return params * (held + 2) + kept * held

    best, size = math.inf, len(states.compute_s)
    for count in range(1, min(size, machines) + 1):
        for cuts in itertools.combinations(range(size - 1), count - 1):
            bounds = list(itertools.pairwise([-1, *cuts, size - 1]))
            for replicas in itertools.product(range(1, machines + 1), repeat=count):
                if sum(replicas) != machines:
                    continue
                later = [sum(replicas[k + 1 :]) for k in range(count)]
                if all(
                    needed(*bound, m, after) <= nbytes
                    for bound, m, after in zip(bounds, replicas, later, strict=True)
                ):
                    times = [2 * states.output_bytes[cut] / 2.0 for cut in cuts]
                    for (before, last), m in zip(bounds, replicas, strict=True):
                        compute = between(states.compute_s, before, last)
                        params = between(states.param_bytes, before, last)
                        times.append(max(compute, 2 * (m - 1) * params / 2.0) / m)
                    best = min(best, max(times))
    if math.isinf(best):
        with pytest.raises(ConfigError, match="fits into"):
            partition(states, [MachineLevel(machines, 2.0)], memory=memory)
    else:
        assert partition(
            states, [MachineLevel(machines, 2.0)], memory=memory
        ).seconds == pytest.approx(best)


def test_the_text_comes_back_as_it_was():
    for name in ("vgg16", "gnmt"):
        graph = profile(name)
        staged = graph._replace(
            nodes={n: node._replace(stage=k % 3) for k, (n, node) in enumerate(graph.nodes.items())}
        )
        again = parse_graph(format_graph(staged))
        assert again.edges == staged.edges
        assert [n.stage for n in again.nodes.values()] == [n.stage for n in staged.nodes.values()]
        assert [n.text for n in again.nodes.values()] == [n.text for n in staged.nodes.values()]
        assert sum(n.forward_s for n in again.nodes.values()) == pytest.approx(
            sum(n.forward_s for n in graph.nodes.values())
        )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the graph has no nodes"),
        (f"{LINE}\n\nnonsense", "line 3 is neither a node .* nor an edge"),
        (f"{LINE}\n{LINE}", "line 2: node 'node1' is defined twice"),
        (f"{LINE}\n\tnode1 -- node2", "line 2: the edge names an undefined node, 'node2'"),
        (LINE.replace("=1.000", "=-1.000"), "line 1: times and sizes must be .* not negative"),
        (LINE.replace("=1.000", "=nan"), "line 1: times and sizes must be finite"),
        (LINE.replace("=1.000", "=fast"), "line 1: could not convert string to float: 'fast'"),
        (f"{LINE}\n\tnode1 -- node1", "the graph has a cycle, through or before node1"),
    ],
)
def test_malformed_text_is_refused_with_its_line(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_graph(text)


def test_what_cannot_be_divided_is_refused():
    only_input = parse_graph(LINE.replace("Linear(3, 3)", "Input0"))
    with pytest.raises(ConfigError, match="has only inputs"):
        states_of(only_input)
    states = states_of(parse_graph(LINE))
    with pytest.raises(ConfigError, match="a straight pipeline of 2 stages needs 2 cuts"):
        partition(states, [MachineLevel(2, 1e9)], straight=True)
    with pytest.raises(ConfigError, match="a straight pipeline of 2 stages needs 2 cuts"):
        partition(states, [MachineLevel(2, 1e9)], straight=True, memory=MemoryLimit(1e15))
    with pytest.raises(
        ConfigError, match=r"at least 1 machine and a bandwidth above 0 bytes/s, got \[\(0, "
    ):
        partition(states, [MachineLevel(0, 1e9)])
    free = chain([0, 0], [0, 0], [0, 0])
    assert partition(states_of(free), [MachineLevel(3, 1e9)]).seconds == 0


def test_the_command_shows_the_stages_and_writes_them(tmp_path, capsys):
    out = tmp_path / "staged.txt"
    words = ["plan", "pipedream", str(DATA / "vgg16.graph.txt"), "--machines", "8"]
    assert main([*words, "--recurrence", "released", "--out", str(out)]) == 0
    assert "103.83 ms per minibatch" in capsys.readouterr().out
    stages = [node.stage for node in parse_graph(out.read_text()).nodes.values()]
    assert sorted(set(stages)) == [0, 1]
    assert main(["plan", "pipedream", str(tmp_path / "none.txt"), "--machines", "2"]) == 2
    assert "cannot read" in capsys.readouterr().err
