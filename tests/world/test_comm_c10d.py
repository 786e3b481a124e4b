"""Groups over a process group of torch keep the claims that their capabilities allow, and say what is wrong."""

from __future__ import annotations

import pytest
import torch

from braid.comm import Group
from braid.comm.engines.c10d import C10dEngine
from braid.errors import CommTimeout, ConfigError, MismatchError
from support.claims import of_rank, possible, reduced
from support.delegated_world import delegated_world
from support.group_conformance import GROUP_CLAIMS
from support.refusal_claims import MISMATCHES, check_mismatch
from support.worlds import run_threads

WORK_COUNTER = possible(GROUP_CLAIMS, C10dEngine.capabilities)


def _over_gloo(group: Group, main, *args):
    gloo = delegated_world(group.context)
    try:
        result = main(gloo, *args)
        group.barrier()
        return result
    finally:
        gloo.close()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("claim", WORK_COUNTER, ids=lambda c: c.__name__)
def test_claim_holds_over_gloo(claim, size):
    run_threads(size, _over_gloo, claim)


@pytest.mark.parametrize("kind", [kind for kind in MISMATCHES if kind != "algorithm"])
def test_mismatch_is_the_same_error_on_every_rank(kind):
    texts = run_threads(3, _over_gloo, check_mismatch, kind)
    assert texts == [texts[0]] * 3


def _sums(group: Group) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int16):
        inputs = [of_rank(r, 1001, dtype) for r in range(group.size)]
        for op in ("sum", "avg", "min", "max", "product"):
            found = group.all_reduce(inputs[group.rank].clone(), op)
            torch.testing.assert_close(found, reduced(inputs, op))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_are_those_of_a_loop_but_for_their_order(size):
    run_threads(size, _over_gloo, _sums)


def _late(group: Group) -> str:
    if group.rank == 0:
        with pytest.raises(CommTimeout) as caught:
            group.all_reduce(torch.ones(3), timeout_s=0.3)
        return str(caught.value)
    return ""


def test_a_timeout_names_who_has_not_spoken():
    text = run_threads(2, _over_gloo, _late)[0]
    assert "all_reduce(float32[3], sum)" in text
    assert "ranks [1]" in text


def _later_mismatch(group: Group) -> str:
    x, y = torch.ones(3), torch.ones(4)
    for _ in range(2):
        group.all_reduce(x)
        group.all_reduce(y)
    with pytest.raises(MismatchError) as caught:
        group.all_reduce(x if group.rank else y)
    return str(caught.value)


def _checked(group: Group, main):
    gloo = delegated_world(group.context, checked=True)
    result = main(gloo)
    group.barrier()
    gloo.close()
    return result


def test_checked_mode_compares_every_call():
    texts = run_threads(2, _checked, _later_mismatch)
    assert texts[0] == texts[1]
    assert "float32[3]" in texts[0]
    assert "float32[4]" in texts[0]


def _attached(group: Group) -> None:
    engine = C10dEngine(group.context, group.ranks, device_types=frozenset({"meta"}), name="meta")
    group.attach(engine)
    assert group.all_reduce(torch.ones(2)).tolist() == [group.size] * 2
    assert engine.statistics.num_operations == 0
    half = group.split(group.rank % 2)
    assert half is not None
    with pytest.raises(Exception, match=r"meta|Meta"):  # torch's own error: Gloo has no such device
        group.all_reduce(torch.ones(2, device="meta"))
    assert engine.statistics.num_operations == 1
    group.barrier()
    half.close()


def test_tensors_go_to_the_engine_of_their_device():
    run_threads(2, _attached)


def _algorithm(group: Group) -> None:
    with pytest.raises(
        ConfigError, match="algorithm 'direct' cannot be used by this group: leave it out"
    ):
        group.all_reduce(torch.ones(2), algorithm="direct")


def test_algorithms_of_other_engines_are_refused():
    run_threads(1, _over_gloo, _algorithm)
