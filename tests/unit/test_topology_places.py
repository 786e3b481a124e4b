"""Where ranks stand: NUMA nodes, hosts, GPUs, and who sends to whom for each level."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.topology import Rings, cpus_of, gpu_levels, node_of, parse_links, rings

TWO_PAIRS = """\
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31,64-95\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31,64-95\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63,96-127\t1\t\tN/A
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63,96-127\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
SWITCHES = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tPIX\tPHB\tPHB\t0-15
GPU1\tPIX\t X \tPHB\tPHB\t0-15
GPU2\tPHB\tPHB\t X \tPIX\t0-15
GPU3\tPHB\tPHB\tPIX\t X \t0-15
"""
NVSWITCH = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X\n"


def test_every_level_has_rings_of_the_first_ranks_of_its_children():
    places = [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)]
    assert rings(places) == [
        Rings("node", 2, ((0, 1), (2, 3), (4, 5), (6, 7))),
        Rings("host", 2, ((0, 2), (4, 6))),
        Rings("network", 2, ((0, 4),)),
    ]


@pytest.mark.parametrize(
    ("places", "levels"),
    [
        ([(0, 0)] * 3, [Rings("host", 3, ((0, 1, 2),))]),
        ([(0, 0), (1, 0), (2, 0)], [Rings("network", 3, ((0, 1, 2),))]),
        ([(0, 0), (0, 1)], [Rings("host", 2, ((0, 1),))]),
    ],
)
def test_levels_of_one_child_are_left_out(places, levels):
    assert rings(places) == levels


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([(0, 0)], "2 ranks or more, found 1"),
        ([(0, 0), (0, 0), (1, 0)], "as many children in every host"),
        ([(0, 0), (1, 0), (0, 0), (1, 0)], "ranks of one host to follow each other"),
    ],
)
def test_ranks_that_are_no_tree_are_refused(places, words):
    with pytest.raises(ConfigError, match=words):
        rings(places)


@given(st.sets(st.integers(0, 300)))
def test_lists_of_processors_are_read_as_the_kernel_writes_them(cpus):
    ordered = sorted(cpus)
    runs: list[list[int]] = []
    for cpu in ordered:
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    text = ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
    assert cpus_of(text + "\n") == tuple(ordered)


@given(st.text(min_size=1, max_size=20).filter(lambda text: not set(text) <= set("0123456789-,")))
def test_what_is_no_list_of_processors_is_refused(text):
    with pytest.raises(ConfigError, match=r"0-3,8-11"):
        cpus_of(f"0,{text}!")


def test_ranks_are_spread_evenly_over_nodes_or_not_at_all():
    assert [node_of(rank, 4, 2) for rank in range(4)] == [0, 0, 1, 1]
    assert [node_of(rank, 3, 2) for rank in range(3)] == [0, 0, 0]
    assert node_of(0, 1, 0) == 0


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        (TWO_PAIRS, [Rings("nvlink", 2, ((0, 1), (2, 3))), Rings("host", 2, ((0, 2),))]),
        (SWITCHES, [Rings("switch", 2, ((0, 1), (2, 3))), Rings("socket", 2, ((0, 2),))]),
        (NVSWITCH, [Rings("nvlink", 2, ((0, 1),))]),
    ],
)
def test_gpus_that_are_near_each_other_form_a_unit(text, levels):
    assert gpu_levels(parse_links(text)) == levels


@pytest.mark.parametrize(
    ("text", "count", "words"),
    [
        ("No devices were found", None, "a matrix of GPUs"),
        (NVSWITCH.replace("NV18", "XYZ"), None, "found 'XYZ'"),
        (NVSWITCH.replace("GPU1\tNV18\t X", "GPU1\tNV18"), None, "a row of 2 links for GPU1"),
        (NVSWITCH, 8, "expected 8 GPUs"),
    ],
)
def test_matrices_that_make_no_sense_are_refused(text, count, words):
    with pytest.raises(ConfigError, match=words):
        parse_links(text, count=count)


@given(st.text(max_size=200))
def test_any_other_text_is_refused_in_words(text):
    with pytest.raises(ConfigError, match="GPU"):
        parse_links(text)
