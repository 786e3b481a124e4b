"""PipeDream's optimizer on a graph with two branches, compared with a search of all pipelines.

braid run -n 1 examples/47_pipedream_plan.py
"""

from __future__ import annotations

import itertools

import numpy as np

from braid.plan.pipedream import MachineLevel, ProfiledGraph, ProfiledNode, partition, states_of

BANDWIDTH, MACHINES = 1e9, 4  # bytes per second between two machines
MS, MB = 1e-3, 1e6


def diamond() -> ProfiledGraph:
    """Return a -> b, c -> d -> e: b and c are independent, d has the most parameters."""
    rows = {  # forward ms, backward ms, output MB, parameters MB
        "a": (4, 8, 4, 1),
        "b": (3, 6, 2, 3),
        "c": (2, 4, 2, 3),
        "d": (1, 2, 1, 40),
        "e": (1, 2, 1, 10),
    }
    nodes = {
        name: ProfiledNode(name, f"Layer {name}", f * MS, b * MS, out * MB, params * MB)
        for name, (f, b, out, params) in rows.items()
    }
    edges = {"a": ("b", "c"), "b": ("d",), "c": ("d",), "d": ("e",), "e": ()}
    return ProfiledGraph(nodes, edges)


def best_of_all(states) -> float:
    """Return the least time of a minibatch over all pipelines, by the formula of the paper."""
    best, last = np.inf, len(states.compute_s) - 1
    for count in range(MACHINES):
        for cuts in itertools.combinations(range(last), count):
            ends = [*cuts, last]
            if not all(states.before[b, a] for a, b in itertools.pairwise(ends)):
                continue
            for replicas in itertools.product(range(1, MACHINES + 1), repeat=len(ends)):
                if sum(replicas) != MACHINES:
                    continue
                times = [2 * states.output_bytes[cut] / BANDWIDTH for cut in cuts]
                done_s = done_bytes = 0.0
                for end, m in zip(ends, replicas, strict=True):
                    compute_s = states.compute_s[end] - done_s
                    nbytes = states.param_bytes[end] - done_bytes
                    times.append(max(compute_s, 2 * (m - 1) * nbytes / BANDWIDTH) / m)
                    done_s, done_bytes = states.compute_s[end], states.param_bytes[end]
                best = min(best, max(times))
    return best


def main() -> None:
    graph = diamond()
    states = states_of(graph)
    for members, handed in zip(states.members, states.handed_on, strict=True):
        print(f"up to {''.join(sorted(members)):5} hands on {' '.join(handed)}")
    for recurrence in ("paper", "released"):
        best = partition(states, [MachineLevel(MACHINES, BANDWIDTH)], recurrence=recurrence)
        stages = ", ".join(f"{''.join(sorted(s.nodes))} x{s.replicas}" for s in best.stages)
        print(
            f"{recurrence:8} {stages}: {best.seconds / MS:.2f} ms, {best.one_machine_s / MS:.0f} "
            f"on one machine, {best.data_parallel_s / MS:.2f} data parallel"
        )
    assert partition(states, [MachineLevel(MACHINES, BANDWIDTH)]).seconds == best_of_all(states)
    print("the paper's program gives the least time of all pipelines, bit by bit")


if __name__ == "__main__":
    main()
