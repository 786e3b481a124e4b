"""A run on Ray that may grow: which free resources become hosts of the run, and which do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from braid.errors import ConfigError
from braid.launch.engines.client_words import FromClient
from braid.launch.engines.invitation import Invitation
from braid.launch.engines.options import EngineOptions
from braid.launch.engines.ray_agents import RayAgents
from braid.launch.engines.ray_nodes import free_nodes, place

ONE = {"CPU": 1.0}


class Group:
    """A placement group, with processors by node."""

    def __init__(self, bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> None:
        nodes = [label["ray.io/node-id"] for label in labels]
        self.sizes = [(node, b["CPU"]) for node, b in zip(nodes, bundles, strict=True)]

    def wait(self, limit_s: float) -> bool:
        return limit_s > 0


class Cluster:
    """Ray as its client sees it: nodes such as `a-1` of host `a`, with processors, and groups."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = {name.replace("_", "-"): float(size) for name, size in sizes.items()}
        self.draining: set[str] = set()
        self.groups: list[Group] = []
        self.state = "CREATED"  # of a group
        self.num_looks = 0
        self.exceptions = SimpleNamespace(RayError=LookupError)
        self._private = SimpleNamespace(
            state=SimpleNamespace(
                available_resources_per_node=self._free,
                state=SimpleNamespace(get_draining_nodes=lambda: self.draining),
            )
        )
        self.util = SimpleNamespace(
            placement_group=self._make,
            placement_group_table=lambda _: {"state": self.state},
            remove_placement_group=self.groups.remove,
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                    group.sizes[placement_group_bundle_index][0]
                )
            ),
        )

    def nodes(self) -> list[dict[str, object]]:
        self.num_looks += 1
        return [
            {"NodeID": node, "NodeManagerHostname": node.partition("-")[0], "Alive": True}
            for node in self.sizes
        ]

    def options(self, *, scheduling_strategy: str, **_resources: object) -> Any:
        run = SimpleNamespace(remote=lambda *_: scheduling_strategy)  # the node is the future
        return SimpleNamespace(remote=lambda: SimpleNamespace(run=run))

    def get(self, end: str) -> None:
        raise LookupError(end)

    def _free(self) -> dict[str, dict[str, float]]:
        free = {node: {"CPU": size} for node, size in self.sizes.items()}
        for node, size in [pair for group in self.groups for pair in group.sizes]:
            free.get(node, {"CPU": 0.0})["CPU"] -= size
        return free

    def _make(
        self, bundles: list[dict[str, float]], strategy: str, bundle_label_selector: Any
    ) -> Group:
        assert strategy == "PACK"
        self.groups.append(Group(bundles, bundle_label_selector))
        return self.groups[-1]


class Client:
    """Agents of a run that has begun on all that was free, up to `num_ranks`."""

    def __init__(
        self, cluster: Cluster, capfd: pytest.CaptureFixture[str], num_ranks: int, max_ranks: int
    ) -> None:
        self.agents = RayAgents(cluster, cluster, ONE, "pack", max_ranks, "")
        self._capfd = capfd
        self._num_nodes = 0
        self.agents.reserve(place(free_nodes(cluster), num_ranks, ONE))
        self.invite(*self.hosts())

    def hosts(self) -> dict[str, int]:
        """Return the hosts that the launcher was sent last; empty if it was sent none since."""
        lines = self._capfd.readouterr().out.encode().splitlines()
        messages = [msgspec.json.decode(line, type=FromClient) for line in lines]
        return dict(next((m.hosts for m in reversed(messages) if m.hosts), ()))

    def grow(self) -> dict[str, int]:
        self.agents.grow()
        return self.hosts()

    def invite(self, *names: str) -> None:
        nodes = dict(enumerate(names, self._num_nodes))
        self._num_nodes += len(nodes)
        self.agents.start(Invitation(addresses=(), machine="", nodes=nodes, secret="").to_line())


def test_free_resources_become_a_host_when_ray_has_made_their_group(capfd):
    cluster = Cluster(a=2)
    client = Client(cluster, capfd, 2, 5)
    assert client.grow() == {}, "no resources are free"
    cluster.sizes |= {"b": 2.0, "a": 3.0}
    assert client.grow() == {}, "the groups are requested"
    assert client.grow() == {"a": 2, "b": 2, "a#2": 1}


def test_ray_is_not_asked_while_the_run_has_its_largest_number_of_ranks(capfd):
    cluster = Cluster(a=2)
    client = Client(cluster, capfd, 2, 3)
    cluster.sizes["b"] = 4.0
    assert [client.grow(), client.grow()] == [{}, {"a": 2, "b": 1}]
    client.invite("b")
    num_looks = cluster.num_looks
    assert [client.grow() for _ in range(5)] == [{}] * 5
    assert cluster.num_looks == num_looks


def test_a_group_that_ray_does_not_make_is_given_back_and_requested_again(capfd):
    cluster = Cluster(a=1)
    client = Client(cluster, capfd, 1, 2)
    cluster.sizes["b"], cluster.state = 1.0, "PENDING"
    client.grow()
    assert len(cluster.groups) == 2
    assert client.grow() == {"a": 1}
    assert len(cluster.groups) == 1
    cluster.state = "CREATED"
    assert [client.grow(), client.grow()] == [{}, {"a": 1, "b": 1}]


def test_a_node_is_used_again_only_if_it_comes_back_to_the_cluster(capfd):
    cluster = Cluster(a=1, b_1=1)
    client = Client(cluster, capfd, 2, 2)
    assert client.agents.ended("b-1")
    assert client.hosts() == {"a": 1}
    assert client.grow() == {}, "an agent has ended there"
    del cluster.sizes["b-1"]
    cluster.sizes["b-2"] = 1.0
    assert [client.grow(), client.grow()] == [{}, {"a": 1, "b#2": 1}]
    client.invite("b#2")
    client.agents.close()
    assert cluster.groups == []


def test_a_node_that_ray_takes_away_soon_is_not_used(capfd):
    cluster = Cluster(a=1)
    client = Client(cluster, capfd, 1, 2)
    cluster.sizes["b"], cluster.draining = 1.0, {"b"}
    assert [client.grow(), client.grow()] == [{}, {}]


def test_a_run_begins_with_what_fits_up_to_its_largest_number_of_ranks():
    nodes = free_nodes(Cluster(a=2, b=2))
    counts = [sum(count for _, count in place(nodes, 0, ONE, "pack", most)) for most in (3, 4, 9)]
    assert counts == [3, 4, 4]


@pytest.mark.parametrize("word", ["--num-ranks=2", "--max-ranks=2"])
def test_options_of_the_engine_do_not_set_the_number_of_ranks(word):
    with pytest.raises(ConfigError, match=f"set the number of ranks.* leave {word} out"):
        EngineOptions(engine="ray", words=(word,))
