"""Groups on threads and on processes keep every claim of the conformance suite."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path

import pytest
import torch

from braid.comm import Group
from braid.comm.algorithms import all_reduce as algorithms
from braid.errors import CommError, CommTimeout, MismatchError, PeerLostError, StaleError
from braid.runtime.clock import MonotonicClock
from braid.runtime.events import Recorder
from braid.runtime.store import HashStore, RanksMissingError
from braid.runtime.transport import Fabric, RankContext
from support.claims import possible
from support.group_conformance import GROUP_CLAIMS
from support.refusal_claims import MISMATCHES, check_mismatch
from support.worlds import run_threads

SIZES = (1, 2, 3)


def _keep(group: Group, claim) -> None:
    for one in possible([claim], group.engine.capabilities):
        one(group)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("claim", GROUP_CLAIMS, ids=lambda c: c.__name__)
def test_claim_holds(world, claim, size):
    world(size, _keep, claim)


@pytest.mark.procs
@pytest.mark.parametrize("claim", GROUP_CLAIMS, ids=lambda c: c.__name__)
def test_claim_holds_on_three_processes(procs, claim):
    procs(3, _keep, claim)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatch_is_the_same_error_on_every_rank(world, kind, size):
    texts = world(size, check_mismatch, kind)
    assert texts == [texts[0]] * size


def _barrier_but_one(group: Group) -> None:
    if group.rank == group.size - 1:
        msg = "no data"
        raise ValueError(msg)
    group.barrier()


def test_a_rank_that_raises_ends_the_waits_of_the_others(world):
    with pytest.raises(ValueError, match="no data") as caught:
        world(3, _barrier_but_one)
    others = {r: e for r, e in caught.value.rank_errors.items() if r != 2}
    assert sorted(others) == [0, 1]
    for error in others.values():
        assert isinstance(error, CommError)
        assert "rank 2" in str(error)
        assert "ValueError: no data" in str(error)


def _leave_early(group: Group) -> str:
    group.barrier()
    if group.rank == 0:
        return "left"
    try:
        group.all_reduce(torch.ones(2))
    except PeerLostError as error:
        return str(error)
    return "nothing happened"


def test_a_rank_that_left_is_named_by_who_still_needs_it(world):
    left, *others = world(3, _leave_early)
    assert left == "left"
    for text in others:
        assert text.startswith("rank 0 ")
        assert "already left" in text


def _all_but_one(group: Group, gate: threading.Event) -> str:
    group.barrier()
    if group.rank == 0:
        gate.wait()
        return ""
    try:
        group.all_reduce(torch.ones(2), timeout_s=0.2)
    except (CommTimeout, CommError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        gate.set()
    return "nothing happened"


def test_a_deadline_names_who_has_not_come_and_what_it_did_last():
    _, text = run_threads(2, _all_but_one, threading.Event())
    assert text.startswith("CommTimeout: all_reduce(float32[2], sum) did not end within 0.2 s")
    assert "rank 0  1 step(s) behind, last in barrier()" in text
    assert "test_comm_group.py" in text


def _after_mismatch(group: Group) -> None:
    check_mismatch(group, "shape")
    group.barrier()


def test_a_group_that_disagreed_does_not_go_on(world):
    with pytest.raises(StaleError, match="ranks asked for different operations"):
        world(2, _after_mismatch)


def _stuck(group: Group, gate: threading.Event) -> None:
    if group.rank == 1:
        gate.wait(20)
    group.barrier()


def test_a_world_that_hangs_shows_stacks_and_events():
    gate = threading.Event()
    timer = threading.Timer(1.5, gate.set)
    timer.start()
    with pytest.raises(TimeoutError) as caught:
        run_threads(2, _stuck, gate, timeout_s=0.3)
    timer.join()
    text = str(caught.value)
    assert "gate.wait(20)" in text
    assert "barrier()#1 open" in text


def _sleeps(group: Group) -> None:
    import select

    if group.rank == 1:
        select.select([], [], [], 600)
    group.barrier()


@pytest.mark.procs
def test_a_pool_that_hangs_shows_stacks_and_events(pool):
    pool.run(2, Group.barrier)  # the processes are up
    with pytest.raises(TimeoutError) as caught:
        pool.run(2, _sleeps, timeout_s=1.0)
    text = str(caught.value)
    assert "in _sleeps" in text
    assert "--- last events of rank 0\n    barrier()#1 open" in text


def _many_threads(group: Group) -> list[float]:
    parts = [group.split(0) for _ in range(8)]
    totals: list[float] = [0.0] * len(parts)

    def work(index: int) -> None:
        # the later rank comes last everywhere, so all threads of the others sleep at once
        if group.rank:
            started.wait()
        totals[index] = parts[index].all_reduce(torch.ones(1)).item()

    started = threading.Event()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(parts))]
    for thread in threads:
        thread.start()
    group.barrier()
    started.set()
    for thread in threads:
        thread.join()
    return totals


def test_more_threads_than_doorbells_may_wait(world):
    assert world(2, _many_threads) == [[2.0] * 8] * 2


def _draw(group: Group) -> None:
    torch.randn(1)


def test_a_thread_world_may_not_use_the_default_generator():
    with pytest.raises(AssertionError, match="default generator"):
        run_threads(2, _draw)


def _fork(group: Group) -> int:
    import os

    pid = os.fork()
    if pid == 0:
        try:
            group.barrier()
        except StaleError:
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    group.barrier()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.procs
def test_a_forked_child_cannot_use_its_parents_group(procs):
    assert procs(2, _fork) == [7, 7]


def _shared_words(group: Group) -> tuple[int, list[int]]:
    """The length of this rank's name table and the addresses of its control pages."""
    engine = group.engine
    return engine.transport.names._used[0], list(engine.pages._directories[group.rank])


def _use_in_a_child(group: Group) -> list[str]:
    """What a forked child got of its parent's group."""
    import os

    def register_many() -> None:
        for _ in range(80):  # more than there are lines on the first control page
            group.persistent("all_reduce", torch.ones(3))

    acts = {
        "all_reduce": lambda: group.all_reduce(torch.ones(1, 2, 3)),
        "start": lambda: group.starting().all_reduce(torch.ones(1, 2, 4)),
        "coalesce": group.coalesce,
        "send": lambda: group.send(torch.ones(5), 1 - group.rank),
        "recv": lambda: group.recv(torch.ones(5), None),
        "persistent": register_many,
        "rebuild": lambda: group.rebuild(timeout_s=0.1),
    }
    before, (read, write) = _shared_words(group), os.pipe()
    if not os.fork():
        allowed = []
        for name, act in acts.items():
            try:
                act()
                allowed.append(name)
            except StaleError:
                pass
            except BaseException as exc:  # noqa: BLE001 - told to the test
                allowed.append(f"{name}: {exc!r}")
        os.write(write, "\n".join(allowed).encode())
        os._exit(0)
    os.wait()
    os.close(write)
    with os.fdopen(read) as pipe:
        allowed = pipe.read().splitlines()
    changed = [] if _shared_words(group) == before else ["the parent's memory"]
    group.barrier()
    return allowed + changed


@pytest.mark.procs
def test_a_forked_child_leaves_its_parents_memory_alone(procs):
    assert procs(2, _use_in_a_child) == [[], []]


def _closes_in_a_child(group: Group) -> int:
    """How a forked child ends that closes a group whose progress another thread was just at."""
    import os
    import signal

    with group.engine.progress._lock:
        pid = os.fork()
        if not pid:
            signal.alarm(5)
            group.abort("child")
            group.close()
            os._exit(7)
    _, status = os.waitpid(pid, 0)
    group.barrier()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.procs
def test_a_forked_child_may_close_its_parents_group(procs):
    assert procs(2, _closes_in_a_child) == [7, 7]


def _pass_descriptors(group: Group, directory: str) -> float:
    from braid.runtime.clock import MonotonicClock
    from braid.runtime.events import Recorder
    from braid.runtime.store import FileStore
    from braid.runtime.transport import Health, RankContext, connect

    clock, store = MonotonicClock(), FileStore(f"{directory}/store")
    health = Health(group.rank, clock)
    transport = connect(group.rank, group.size, store, clock, health, pass_descriptors=True)
    context = RankContext(group.rank, group.size, clock, Recorder(), health, store)
    other = Group.world(context, transport)
    total = other.all_reduce(torch.ones(100_000))[-1].item()
    group.barrier()
    transport.close()
    store.close()
    return total


@pytest.mark.procs
def test_descriptors_are_handed_over_where_the_kernel_refuses(procs, tmp_path):
    assert procs(3, _pass_descriptors, str(tmp_path)) == [3.0, 3.0, 3.0]


def _wait_for_background_first(group: Group, started: threading.Event) -> None:
    x, y = group.empty((300_000,)).fill_(1.0), torch.ones(10)
    request = group.persistent("all_reduce", x)
    if group.rank == 0:
        work = request.start()
        started.set()
        group.all_reduce(y, async_op=True, timeout_s=5).wait()
        work.wait()
    else:
        started.wait()
        threading.Event().wait(0.05)  # most likely the other rank has nothing to do but wait by now
        request.start().wait()
        group.all_reduce(y, async_op=True, timeout_s=5).wait()
    assert torch.equal(x, torch.full_like(x, 2.0))


def test_who_waits_for_background_work_goes_on_with_started_requests():
    run_threads(2, _wait_for_background_first, threading.Event())


def _registers_again(group: Group) -> list[int]:
    """The numbers of requests after one that could not be made on the last rank."""
    register = group.engine.request

    def fail_once(*_args: object) -> None:
        group.engine.request = register
        msg = "no memory for another channel"
        raise CommError(msg)

    if group.rank == group.size - 1:
        group.engine.request = fail_once
        with pytest.raises(CommError):
            group.persistent("all_reduce", torch.ones(1))
    requests = [group.persistent("all_reduce", torch.ones(1)) for _ in range(2)]
    return [request._number for request in requests]


def test_a_request_that_could_not_be_made_keeps_no_number():
    assert run_threads(2, _registers_again) == [[0, 1], [0, 1]]


def _retires(group: Group) -> tuple[list[float], list[str]]:
    found, said = [], []
    last = group.persistent("all_reduce", torch.ones(1))
    for step in range(1, 5):
        x = group.empty((10**step,)).fill_(float(step))
        request = group.persistent("all_reduce", x)
        for _ in range(step):
            request.start().wait()
        request.retire()
        found.append(x.mean().item())
        try:
            request.start()
        except StaleError as error:
            said.append(str(error))
    token = torch.ones(1)
    if group.rank == 0:
        work = last.start()
        try:
            last.retire()
        except StaleError as error:
            said.append(str(error))
        group.send(token, 1)
    else:
        group.recv(token, 0)  # before that the first start has not ended
        work = last.start()
    work.wait()
    return found, said


def test_channels_of_retired_requests_serve_later_ones(world):
    first, second = world(2, _retires)
    assert first[0] == second[0] == [step * 2.0**step for step in range(1, 5)]
    assert second[1] == [
        f"Request(1, all_reduce(float32[{10**step}], sum)) was ended by retire() and cannot start again: make a new request"
        for step in range(1, 5)
    ]
    assert first[1][:4] == second[1]
    assert "request 0 (all_reduce(float32[1], sum)) is busy" in first[1][4]


def _numbers_after(group: Group, retired: tuple[int, ...]) -> list[int]:
    requests = [group.persistent("all_reduce", torch.ones(1)) for _ in range(4)]
    for number in retired:
        requests[number].retire()
    return [group.persistent("all_reduce", torch.ones(1))._number for _ in range(4)]


def test_which_channels_come_next_does_not_depend_on_the_order_in_which_others_went():
    for retired in [(1, 3), (3, 1)]:
        assert run_threads(1, _numbers_after, retired) == [[1, 3, 4, 5]]


def _impatient(group: Group, gate: threading.Event) -> str:
    x = group.empty((8,)).fill_(1.0)
    request = group.persistent("all_reduce", x)
    if group.rank == 1:
        gate.wait()
        request.start().wait()
        return ""
    work = request.start()
    try:
        work.wait(0.05)
    except CommTimeout as error:
        return str(error)
    finally:
        gate.set()
        work.wait()
        assert torch.equal(x, torch.full((8,), 2.0))
    return "nothing happened"


def test_a_wait_with_its_own_time_leaves_the_request_under_way():
    text, _ = run_threads(2, _impatient, threading.Event())
    assert text == (
        "all_reduce(float32[8], sum) has not ended within 0.05 s and still runs: call wait() again"
    )


def _closes_early(group: Group) -> str:
    part = group.split(0)
    part.barrier()
    if group.rank == 0:
        part.close()
        group.barrier()
        return ""
    try:
        part.all_reduce(torch.ones(3))
    except PeerLostError as error:
        return str(error)
    finally:
        group.barrier()
    return "nothing happened"


def test_a_group_closed_by_one_member_ends_the_waits_of_the_others(world):
    _, *others = world(3, _closes_early)
    for text in others:
        assert text.startswith("rank 0 has already left (it closed the group), while rank ")


def test_messages_have_the_numbers_that_the_launcher_gave_the_ranks():
    def main(group: Group) -> list[str]:
        group.context.health.numbers = (0, 2)
        parts = [group.split(0) for _ in range(2)]
        with pytest.raises(MismatchError) as mismatch:
            parts[0].all_reduce(torch.ones(2 + group.rank))
        if group.rank == 1:
            return []
        with pytest.raises(PeerLostError) as lost:
            parts[1].all_reduce(torch.ones(2))
        assert lost.value.rank == 1
        return [*re.findall(r"rank \d", str(mismatch.value)), str(lost.value)]

    found, _ = run_threads(2, main)
    assert found[:2] == ["rank 0", "rank 2"]
    assert found[2].startswith("rank 2 has already left")
    assert found[2].endswith(
        ", while rank 0 was in all_reduce(float32[2], sum) of the group of ranks [0, 2]"
    )


def _closes_with_a_start_under_way(group: Group) -> str:
    part = group.split(0)
    work = None
    if group.rank == 0:
        work = part.persistent("all_reduce", part.empty((9,))).start()
    group.barrier()
    part.close()
    group.all_reduce(torch.ones(3))
    return str(work.exception()) if work else ""


def test_closing_a_group_fails_what_is_under_way_in_it(world):
    text, _ = world(2, _closes_with_a_start_under_way)
    assert text == ("the group was closed while all_reduce(float32[9], sum) was in progress")


def _closes_while_read(group: Group, gate: threading.Event) -> bool:
    part = group.split(0)
    group.empty(
        (900_000,)
    )  # the rest of the extent is small: what is freed is soon given out again
    x = torch.full((60_000,), 1.0)
    part.all_reduce(x, algorithm="direct")
    part.close()
    if group.rank == 0:
        _ = [group.empty((60_000,)).fill_(float("nan")) for _ in range(4)]
        gate.set()
    group.barrier()
    return bool(torch.equal(x, torch.full_like(x, 2.0)))


def test_closing_a_group_leaves_alone_what_a_slow_member_still_reads(monkeypatch):
    gate = threading.Event()
    combine = algorithms.combine

    def slow_on_rank_1(*args):
        if threading.current_thread().name == "rank-1":
            gate.wait(10)
        combine(*args)

    monkeypatch.setattr(algorithms, "combine", slow_on_rank_1)
    assert run_threads(2, _closes_while_read, gate) == [True, True]


def _kept_bytes(group: Group) -> list[int]:
    kept = []
    for _ in range(8):
        parts = [group.split(0) for _ in range(5)]
        for part in parts:
            part.all_reduce(torch.ones(20_000))
            part.close()
        group.barrier()
        group.split(group.rank).close()  # gives back what the others have closed meanwhile, too
        kept.append(group.engine.transport.arena.statistics()["used_bytes"])
        group.barrier()
    return kept


def test_groups_that_come_and_go_keep_a_few_pages():
    for first, *later in run_threads(2, _kept_bytes):
        assert later[0] == first + 6 * 4096
        assert later[-1] == later[-3] <= first + 4 * 6 * 4096


def _looks_late(group: Group) -> list[bool]:
    """Whether each of 40 groups, of which one member looks much later, is closed for it."""
    parts = []
    for _ in range(40):
        part = group.split(0)
        assert part.engine.pages.ended_member() is None
        part.all_reduce(torch.ones(3))
        part.close()
        group.barrier()
        parts.append(part)
    late = [part.engine.pages for part in parts]
    assert len({pages.number for pages in late}) == 40
    return [pages.unread() and pages.gone(1 - group.rank) for pages in late]


def test_a_group_is_closed_also_for_a_member_that_looks_when_its_page_serves_another_group(world):
    assert world(2, _looks_late) == [[True] * 40] * 2


def _adopts_and_drops(group: Group) -> list[int]:
    counts = []
    for _ in range(5):
        x = torch.ones(100_000)
        group.adopt(x)
        group.all_reduce(x)
        assert x[-1].item() == group.size
        del x
        group.barrier()
        counts.append(_num_mapped())
    return counts


def _num_mapped() -> int:
    """Mappings of files that torch made for tensors that were adopted."""
    return sum(
        "/dev/shm/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )


@pytest.mark.procs
def test_what_peers_have_dropped_is_unmapped(procs):
    for counts in procs(3, _adopts_and_drops):
        assert max(counts) == counts[0]


def _apart(group: Group) -> str:
    """Ranks make their groups in another order, so that they meet under other names."""
    try:
        group.select([0, 1], group.context.store, name=f"mine {group.rank}", timeout_s=0.2)
    except RanksMissingError as error:
        return str(error)
    return ""


def test_a_group_that_other_ranks_make_in_another_order_is_given_up_in_time(world):
    first, second = world(2, _apart)
    assert "ranks [1] have not joined the exchange 'select/mine 0/0' within 0.2 s" in first
    assert "ranks [0] have not joined the exchange 'select/mine 1/0'" in second
    assert "whether all ranks make their groups in the same order" in second


def _averages(group: Group, dtype: torch.dtype) -> list[str]:
    x = torch.tensor([5 + group.rank]).to(dtype)
    if group.rank:  # filters belong to all threads
        group.all_reduce(x, "avg")
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        group.all_reduce(x, "avg")
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.complex64])
@pytest.mark.parametrize("size", [1, 2])
def test_an_average_of_integers_says_that_it_loses_its_fraction(world, size, dtype):
    said = {text for own in world(size, _averages, dtype) for text in own}
    assert len(said) == int(size > 1 and dtype in {torch.int64, torch.uint8})
    assert all("an average of integers loses its fraction" in text for text in said)


def _select_without_the_last(group: Group) -> str:
    if group.rank == group.size - 1:
        msg = "lost on its way"
        raise ValueError(msg)
    with pytest.raises(PeerLostError, match="rank 2 raised ValueError") as caught:
        group.select([0, 1, 2], group.context.store, name="again")
    return str(caught.value)


def test_members_do_not_wait_for_one_that_is_lost_on_its_way_to_a_new_group():
    with pytest.raises(ValueError, match="lost on its way"):
        run_threads(3, _select_without_the_last, timeout_s=20)


def test_a_rank_that_is_lost_before_the_group_of_all_ranks_exists_is_named():
    with Fabric(2) as fabric:
        transport = fabric.transports[0]
        clock = MonotonicClock()
        context = RankContext(0, 2, clock, Recorder(), transport.health, HashStore())
        fabric.lose(1, "was killed")
        with pytest.raises(PeerLostError, match="rank 1 was killed"):
            Group.world(context, transport)


def _close_with_an_operation_of_a_part_under_way(group: Group) -> BaseException | None:
    part = group.split(0)
    assert part is not None
    work = part.persistent("all_reduce", torch.ones(2)).start() if group.rank == 0 else None
    group.barrier()
    group.close()
    return None if work is None else work.exception()


def test_operations_of_parts_end_with_the_group_of_all_ranks():
    error, _ = run_threads(2, _close_with_an_operation_of_a_part_under_way, timeout_s=20)
    assert isinstance(error, StaleError)
