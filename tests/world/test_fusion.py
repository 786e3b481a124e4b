"""The engine: what ranks submit by name, in any order and from any thread, is carried out on all of them alike."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from braid.comm import Group
from braid.compat.horovod.fusion import (
    FusedBatch,
    Fusion,
    FusionHandle,
    FusionOptions,
    Request,
    Result,
    StateOptions,
    TensorTableEntry,
)
from braid.errors import CommError, ConfigError, PeerLostError
from braid.types import dtype_name
from support.pool import RankDiedError


def engine(group: Group, **options: float) -> Fusion:
    part = group.split(0)
    assert part is not None
    return Fusion(part, FusionOptions(state=StateOptions(**options)))  # type: ignore[arg-type]


def asked(name: str, kind: str, x: torch.Tensor, **fields: object) -> Request:
    dtype = dtype_name(x.dtype)
    return Request(name, kind, dtype, tuple(x.shape), x.element_size(), **fields)  # type: ignore[arg-type]


def reduce(
    fusion: Fusion, name: str, x: torch.Tensor, op: str = "sum", **fields: object
) -> FusionHandle:
    return fusion.submit(asked(name, "all_reduce", x, op=op, **fields), x, torch.empty_like(x))


def _factors(group: Group) -> list[torch.Tensor]:
    with engine(group) as fusion:
        whole = torch.tensor([3, 5, 7])
        half = torch.tensor([1.0, 3.0, 5.0], dtype=torch.bfloat16)
        fields = {"prescale": 0.5, "postscale": 3.0}
        handles = [
            reduce(fusion, "whole", whole, **fields),
            reduce(fusion, "half", half, **fields),
            reduce(fusion, "other", half, **fields),
            reduce(fusion, "average", whole + group.rank, "avg"),
        ]
        return [handle.wait() for handle in handles]  # type: ignore[misc]


def test_factors_are_applied_before_and_after_and_averages_of_integers_are_cut_off(world):
    for whole, half, other, average in world(2, _factors):
        assert whole.tolist() == [6, 12, 18]  # 3 * (1 + 1), 3 * (2 + 2), 3 * (3 + 3)
        assert half.tolist() == other.tolist() == [3.0, 9.0, 15.0]
        assert average.tolist() == [3, 5, 7]


# Any order, any thread.


def _shuffled(group: Group, seed: int) -> list[float]:
    random_ = random.Random(100 * seed + group.rank)
    with engine(group, threshold_bytes=256) as fusion:
        sums = []
        for step in range(5):
            xs = {f"x{n}": torch.full((n % 7,), float(n + step + group.rank)) for n in range(30)}
            order = random_.sample(sorted(xs), len(xs))
            found: dict[str, FusionHandle] = {}

            def submit(names: list[str], found=found, xs=xs) -> None:
                found.update({name: reduce(fusion, name, xs[name]) for name in names})

            threads = [threading.Thread(target=submit, args=(order[k::3],)) for k in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sums += [float(found[name].wait().sum()) for name in sorted(found)]  # type: ignore[union-attr]
        return [sum(sums)]


@pytest.mark.parametrize("size", [2, 3])
def test_threads_may_submit_in_any_order(world, size):
    expected = sum(
        (n % 7) * (n + step + rank) for n in range(30) for step in range(5) for rank in range(size)
    )
    for found in world(size, _shuffled, 1):
        assert found == [expected]


def _grouped(group: Group) -> tuple[list[list[float]], bool]:
    with engine(group) as fusion:
        x = torch.ones(2)
        pair = [
            (asked(n, "all_reduce", x, op="sum", group="g", group_size=2), x, None) for n in "ab"
        ]
        if group.rank == 0:
            handles = fusion.submit_all(pair)
            reduce(fusion, "now", x).wait()
            early = handles[0].done()
        else:
            first = fusion.submit(*pair[0])
            reduce(fusion, "now", x).wait()
            early = first.done()
            handles = [first, fusion.submit(*pair[1])]
        return [handle.wait().tolist() for handle in handles], early  # type: ignore[union-attr]


def test_a_group_waits_for_its_last_member(world):
    assert world(2, _grouped) == [([[2.0, 2.0]] * 2, False)] * 2


def _side_by_side(group: Group, op: str) -> list[list[float]]:
    """Four tensors in one, of which rank 1 lays out the last two in another way; and rank 2 has joined."""
    with engine(group) as fusion:
        home = torch.full((64,), float(group.rank + 1))
        places = [0, 16, 32, 48] if group.rank != 1 else [0, 16, 48, 32]
        if group.rank == 2:
            fusion.join().wait()
            return []
        requests = []
        for number, place in enumerate(places):
            x = home[place : place + 10]
            asked_for = asked(f"x{number}", "all_reduce", x, op=op, place=place)
            requests.append((asked_for, x, x))
        found = [handle.wait().tolist() for handle in fusion.submit_all(requests)]  # type: ignore[union-attr]
        fusion.join().wait()
        return found


@pytest.mark.parametrize(("op", "value"), [("sum", 3.0), ("min", 1.0), ("product", 2.0)])
def test_tensors_that_lie_side_by_side_are_reduced_in_place(world, op, value):
    for found in world(3, _side_by_side, op)[:2]:
        assert found == [[value] * 10] * 4


# What goes wrong.


def _collecting(group: Group) -> float:
    """Each rank has a thread that waits for what the other one has not submitted, longer than the others are collected."""
    part = group.split(0)
    assert part is not None
    with Fusion(part, FusionOptions(cycle_time_s=1e6)) as fusion:
        mine, others = f"x{group.rank}", f"x{1 - group.rank}"
        waiting = reduce(fusion, mine, torch.ones(1))
        thread = threading.Thread(target=waiting.wait)
        thread.start()
        seen = fusion.num_cycles
        while fusion.num_cycles < seen + 3:  # its hurry is over
            threading.Event().wait(0.001)
        late = reduce(fusion, "late", torch.ones(1))
        if group.rank:
            late.wait()
        group.barrier()  # rank 0 does not wait for it
        reduce(fusion, others, torch.ones(1)).wait()
        thread.join()
        return late.wait().item()  # type: ignore[union-attr]


def test_nothing_is_collected_while_a_thread_waits(world):
    assert world(2, _collecting) == [2.0, 2.0]


def _stalls(group: Group) -> tuple[list[str], str]:
    part = group.split(0)
    assert part is not None
    told: list[str] = []
    options = StateOptions(stall_check_s=0.05, stall_shutdown_s=0.3)
    with Fusion(
        part, FusionOptions(state=options), on_stall=lambda s: told.append(str(s))
    ) as fusion:
        if group.rank == 1:
            fusion._thread.join()  # it never submits
            return told, ""
        handle = reduce(fusion, "lonely", torch.ones(1))
        with pytest.raises(CommError) as caught:
            handle.wait()
        return told, str(caught.value)


def test_a_rank_that_never_submits_is_named_and_ends_it_in_the_end(world):
    (first, said), (second, _) = world(2, _stalls)
    assert first == second
    assert "submitted by rank 0, not by rank 1" in first[0]
    assert "'lonely' was not carried out: stalled for more than 0.3 s" in said


class Breaks:
    """Carries out nothing on rank 1, with an error that has no words."""

    name, kind = "breaks", "all_reduce"

    def __init__(self, group: Group) -> None:
        self._group = group

    def suits(self, batch: FusedBatch) -> bool:
        return batch.request.op == "sum"

    def carry_out(self, batch: FusedBatch, entries: Sequence[TensorTableEntry]) -> list[Result]:  # noqa: ARG002 - the interface
        if self._group.rank == 1:
            raise MemoryError
        return [self._group.all_reduce(entry.tensor, "sum") for entry in entries]


def _breaks(group: Group) -> tuple[list[str], bool]:
    fusion = engine(group)
    fusion.operations.prefer(Breaks(fusion.group))
    handles = [reduce(fusion, name, torch.ones(2)) for name in ("first", "second")]
    said = []
    for handle in handles:
        with pytest.raises(CommError) as caught:
            handle.wait()
        said.append(str(caught.value))
    with pytest.raises(CommError) as caught:
        reduce(fusion, "late", torch.ones(2))
    said.append(str(caught.value))
    running = fusion.running
    fusion.close()
    return said, running


def test_what_is_being_carried_out_when_a_rank_breaks_fails_on_all_ranks(world):
    for found, running in world(3, _breaks):
        assert not running
        for name, words in zip(("first", "second"), found, strict=False):
            assert words.startswith(f"{name!r} was not carried out: ")
        assert "because the engine has ended: " in found[2]
        assert all("MemoryError" in words for words in found)


def _killed(group: Group) -> tuple[list[int], str]:
    fusion = engine(group)
    reduce(fusion, "first", torch.ones(2)).wait()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lost = []
    for name in ("in flight", "late"):
        with pytest.raises(PeerLostError) as caught:
            reduce(fusion, name, torch.ones(2)).wait()
        lost.append(caught.value.rank)
    fusion.close()
    return lost, str(caught.value)


@pytest.mark.procs
def test_a_rank_that_is_killed_is_named_to_all_that_wait(pool):
    with pytest.raises(RankDiedError) as caught:
        pool.run(2, _killed)
    answers = caught.value.__dict__["answers"]
    assert [answer.error for answer in answers.values()] == [None]
    lost, said = answers[0].result
    assert lost == [1, 1]
    assert "rank 1" in said


def _cannot(group: Group) -> list[str]:
    said = []
    with engine(group) as fusion:
        for x, op in (
            (torch.ones(2) > 0, "avg"),
            (torch.ones(2) + 0j, "max"),
            (torch.ones(2), "?"),
        ):
            with pytest.raises(CommError) as caught:
                reduce(fusion, "x", x, op).wait()
            said.append(str(caught.value))
        said.append(str(reduce(fusion, "x", torch.ones(1)).wait()))
    return said


def test_what_no_rank_can_do_is_refused_and_the_engine_goes_on(world):
    for logic, ordered, unknown, after in world(2, _cannot):
        assert logic.startswith("'x' cannot be reduced: ")
        assert "defined for bool" in logic
        assert "defined for complex64" in ordered
        assert "is not supported by any of" in unknown
        assert after == "tensor([2.])"


STOOD_IN = {
    "sum": [2.0, -3.0],
    "avg": [1.0, -1.5],
    "product": [2.0, -3.0],
    "min": [2.0, -3.0],
    "max": [2.0, -3.0],
}


def _stands_in(group: Group) -> list[object]:
    found: list[object] = []
    with engine(group) as fusion:
        if group.rank == 0:
            x = torch.tensor([2.0, -3.0])
            for dtype in (torch.float32, torch.int32, torch.bfloat16):
                handles = {op: reduce(fusion, f"{op}{dtype}", x.to(dtype), op) for op in STOOD_IN}
                found.append({op: handle.wait().tolist() for op, handle in handles.items()})  # type: ignore[union-attr]
        fusion.join().wait()
    return found


def test_what_stands_in_for_a_joined_rank_changes_nothing(world):
    whole = {**STOOD_IN, "avg": [1.0, -1.0]}
    assert world(2, _stands_in)[0] == [STOOD_IN, whole, STOOD_IN]


def _joins_twice(group: Group) -> list[str]:
    said = []
    with engine(group) as fusion:
        if group.rank == 0:
            first = fusion.join()  # the other rank joins when this one has tried twice
            with pytest.raises(ConfigError) as caught:
                fusion.join()
            said.append(str(caught.value))
        group.barrier()
        if group.rank:
            first = fusion.join()
        first.wait()
    return said


def test_a_rank_that_has_joined_cannot_join_again_before_all_have(world):
    (said,), _ = world(2, _joins_twice)
    assert said.startswith("rank 0 has called join() again")


# Timelines.


def _traced(group: Group, folder: str) -> None:
    with engine(group) as fusion:
        for number in (1, 2):
            fusion.timeline.start(mark_cycles=True)
            for name in "ab":
                reduce(fusion, name, torch.ones(3))
            reduce(fusion, "c", torch.ones(3)).wait()
            fusion.stop_timeline(Path(folder) / f"{number}.json").wait()


def test_a_timeline_shows_every_tensor_on_every_rank(world, tmp_path):
    world(2, _traced, str(tmp_path))
    for number in (1, 2):
        events = json.loads((tmp_path / f"{number}.json").read_bytes())["traceEvents"]
        names = {
            (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
        }
        done = {(e["pid"], names[e["pid"], e["tid"]], e["name"]) for e in events if e["ph"] == "X"}
        for rank in range(2):
            for name in "abc":
                steps = {step for r, n, step in done if (r, n) == (rank, name)}
                assert {"negotiate all_reduce", "queue", "transfer"} <= steps
            assert (rank, "cycles", "exchange") in done
