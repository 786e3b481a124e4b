"""Ranks without shared memory keep every claim that ranks with it keep."""

from __future__ import annotations

import pytest

from braid.comm import Group
from braid.testing.group_conformance import GROUP_CLAIMS, MISMATCHES, check_mismatch, possible
from braid.testing.parts_conformance import PARTS_CLAIMS

CLAIMS = (*GROUP_CLAIMS, *PARTS_CLAIMS)


def _keep(group: Group, claims) -> list[str]:
    kept = possible(claims, group.engine.capabilities)
    for claim in kept:
        claim(group)
    return [claim.__name__ for claim in kept]


@pytest.mark.procs
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_portable_ranks_keep_the_claims_of_groups(portable, size, claim):
    portable(size, _keep, [claim])


@pytest.mark.procs
@pytest.mark.parametrize("kind", MISMATCHES)
def test_portable_ranks_agree_on_what_differs(portable, kind):
    assert len(set(portable(3, check_mismatch, kind))) == 1
