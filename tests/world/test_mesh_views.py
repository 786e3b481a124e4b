"""Groups along other axes over the same ranks."""

from __future__ import annotations

import torch

from braid.comm import Group
from braid.context import mesh
from braid.errors import ConfigError


def _peers(group: Group) -> tuple[list[list[int]], str]:
    dense = mesh("dp=4,tp=2", group)
    experts = dense.view("dp=2,ep=4")
    own = torch.tensor([group.rank])
    groups = (dense["tp"], dense["dp"], experts["ep"], experts["dp"])
    peers = [along.all_gather(own).flatten().tolist() for along in groups]
    try:
        dense.view("ep=6")
    except ConfigError as exc:
        return peers, str(exc)
    return peers, ""


def test_a_view_has_groups_along_its_own_axes(world):
    ranks = world(8, _peers)
    assert ranks[5][0] == [[4, 5], [1, 3, 5, 7], [4, 5, 6, 7], [1, 5]]
    assert {text for _, text in ranks} == {
        "ep=6 has 6 ranks, but dp=4,tp=2 has 8: choose a view with the same number of ranks"
    }
