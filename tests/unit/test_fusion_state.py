"""Ranks that submit in any order, at any time, carry out the same in the same order; and hear the same errors."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from braid.compat.horovod.fusion.autotune import Settings
from braid.compat.horovod.fusion.fusion_state import CycleOutcome, FusionState
from braid.compat.horovod.fusion.options import StateOptions
from braid.compat.horovod.fusion.request import Request, Response
from braid.errors import ConfigError


def reduce(name: str, shape: tuple[int, ...] = (4,), **fields: object) -> Request:
    return Request(name, "all_reduce", "float32", shape, 4, "sum", **fields)  # type: ignore[arg-type]


@dataclass
class World:
    """Machines of all ranks, and exchanges that end when all have come."""

    size: int
    options: StateOptions = field(default_factory=StateOptions)
    now_s: float = 0.0
    num_lists: int = 0

    def __post_init__(self) -> None:
        ranks = range(self.size)
        self.machines = [FusionState(rank, ranks, self.options) for rank in ranks]

    def cycle(self, opened: Sequence[bytes] | None = None) -> CycleOutcome:
        words = opened or [machine.open(self.now_s) for machine in self.machines]
        together = int.from_bytes(words[0], "little")
        for word in words[1:]:
            together &= int.from_bytes(word, "little")
        said = [m.combined(together.to_bytes(len(words[0]), "little")) for m in self.machines]
        assert len(set(said)) == 1
        answer = None
        if said[0]:
            self.num_lists += 1
            lists = [machine.own_list(self.now_s) for machine in self.machines]
            answer = self.machines[0].answer(lists, self.now_s)
        outcomes = [machine.conclude(answer) for machine in self.machines]
        assert all(outcome == outcomes[0] for outcome in outcomes)
        assert len({machine.digest for machine in self.machines}) == 1
        return outcomes[0]

    def submit(self, request: Request, ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.size) if ranks is None else ranks:
            self.machines[rank].submit(request, self.now_s)

    def settle(self) -> list[list[str]]:
        found = []
        while True:
            outcome = self.cycle()
            if not outcome.batches:
                return found
            found += [names(batch.responses) for batch in outcome.batches]


def names(responses: Sequence[Response]) -> list[str]:
    return [response.name for response in responses]


def errors(outcome: CycleOutcome) -> list[str]:
    return [r.error for batch in outcome.batches for r in batch.responses if r.error]


def test_what_all_have_submitted_is_carried_out_whatever_their_order():
    world = World(3)
    for rank, order in enumerate(["abc", "cab", "bca"]):
        for name in order:
            world.submit(reduce(name), [rank])
    assert world.settle() == [["a", "b", "c"]]


def test_what_one_rank_lacks_waits_for_it():
    world = World(3)
    world.submit(reduce("a"), [0, 2])
    assert world.settle() == []
    world.submit(reduce("a"), [1])
    assert world.settle() == [["a"]]


def test_the_second_time_no_list_is_sent():
    world = World(2)
    for _ in range(3):
        world.submit(reduce("a"))
        world.submit(reduce("b"))
        assert world.settle() == [["a", "b"]]
    assert world.num_lists == 1


def test_a_name_in_flight_is_refused_on_its_rank_and_free_again_afterwards():
    world = World(2)
    world.submit(reduce("a"), [0])
    with pytest.raises(ConfigError, match="'a' is already in progress on rank 0"):
        world.submit(reduce("a"), [0])
    world.submit(reduce("a"), [1])
    assert world.settle() == [["a"]]
    world.submit(reduce("a"))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (reduce("a", (5,)), "disagree on the shape of 'a': (4,) on ranks 0, 2; (5,) on rank 1"),
        (Request("a", "all_reduce", "int64", (4,), 8, "sum"), "disagree on the dtype of 'a'"),
        (Request("a", "all_reduce", "float32", (4,), 4, "max"), "disagree on the reduction of 'a'"),
        (Request("a", "broadcast", "float32", (4,), 4, root=0), "disagree on the operation of 'a'"),
        (reduce("a", prescale=2.0), "disagree on the prescale factor of 'a'"),
        (reduce("a", postscale=2.0), "disagree on the postscale factor of 'a'"),
        (reduce("a", device="cuda:0"), "disagree on the device type of 'a'"),
    ],
)  # fmt: skip
def test_what_differs_is_the_same_error_on_all_ranks(other, words):
    world = World(3)
    for _ in range(2):  # from lists, and once more after agreement
        world.submit(reduce("a"), [0, 2])
        world.submit(other, [1])
        (error,) = errors(world.cycle())
        assert words in error
        world.submit(reduce("a"))
        assert world.settle() == [["a"]]


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("reduce_scatter", {"shape": ()}, "is a scalar"),
        ("all_gather", {"shape": ()}, "is a scalar"),
        ("broadcast", {"root": 2}, "one of 2 ranks, got 2"),
        ("all_to_all", {"splits": (1, 2)}, "got [1, 2] for 4 rows on rank 0"),
        ("all_to_all", {"splits": (4,)}, "got [4] for 4 rows"),
        ("all_to_all", {"splits": (5, -1)}, "got [5, -1] for 4 rows"),
    ],
)
def test_what_makes_no_sense_is_refused_on_all_ranks(kind, changes, words):
    fields = {"dtype": "float32", "shape": (4,), "itemsize": 4, **changes}
    world = World(2)
    world.submit(Request("a", kind, **fields))
    (error,) = errors(world.cycle())
    assert words in error


def test_rows_of_all_ranks_come_with_a_gather_and_again_when_they_change():
    world = World(2)
    for rows in [(2, 3), (2, 3), (0, 5), (0, 5), (0, 5)]:
        for rank, count in enumerate(rows):
            world.submit(Request("g", "all_gather", "float32", (count, 7), 4), [rank])
        (batch,) = world.cycle().batches
        assert batch.responses[0].rows == tuple((count,) for count in rows)
    assert world.num_lists == 2


def test_groups_are_carried_out_whole_or_not_at_all():
    world = World(2)
    pair = [reduce(name, group="g", group_size=2) for name in "ab"]
    for _ in range(3):  # by lists, then by bits
        world.submit(pair[0])
        world.submit(reduce("c"))
        world.submit(pair[1], [0])
        assert world.settle() == [["c"]]
        world.submit(pair[1], [1])
        assert world.settle() == [["a", "b"]]


def test_a_group_stays_in_one_batch_whatever_the_limit():
    world = World(2, StateOptions(threshold_bytes=16))
    for name in "abc":
        world.submit(reduce(name, group="g", group_size=3))
    world.submit(reduce("d"))
    world.submit(reduce("e"))
    assert world.settle() == [["a", "b", "c"], ["d"], ["e"]]


def test_batches_look_past_what_does_not_fit():
    world = World(2, StateOptions(threshold_bytes=48))
    for name in "abcde":
        dtype, size = ("float32", 4) if name != "c" else ("int32", 4)
        world.submit(Request(name, "all_reduce", dtype, (4,), size, "sum"))
    assert world.settle() == [["a", "b", "d"], ["c"], ["e"]]


def test_a_cache_that_is_too_small_forgets_the_least_used_everywhere():
    world = World(3, StateOptions(cache_capacity=2))
    for name in "ab":
        world.submit(reduce(name))
    world.settle()
    world.submit(reduce("a"), [0, 1])  # waits in the cache
    assert world.settle() == []
    for name in "cd":  # a and b go
        world.submit(reduce(name))
    assert world.settle() == [["c", "d"]]
    world.submit(reduce("a"), [2])
    assert world.settle() == [["a"]]


def test_ranks_that_have_joined_are_stood_in_for_until_all_have():
    world = World(3)
    world.submit(reduce("a"))
    world.settle()
    world.machines[1].join()
    world.submit(reduce("a"), [0, 2])
    world.submit(reduce("new"), [0, 2])
    assert world.settle() == [["a", "new"]]
    world.submit(Request("b", "broadcast", "float32", (4,), 4, root=0), [0, 2])
    (error,) = errors(world.cycle())
    assert "but rank 1 called join" in error
    with pytest.raises(ConfigError, match="'x' was submitted on rank 1"):
        world.submit(reduce("x"), [1])
    world.machines[2].join()
    assert world.cycle().last_joined == -1
    world.machines[0].join()
    assert world.cycle().last_joined == 0
    world.submit(reduce("a"))
    world.submit(reduce("once more new"), [0, 2])
    assert world.settle() == [["a"]]
    assert world.cycle().last_joined == -1


def test_what_is_in_the_cache_and_cannot_go_on_without_a_joined_rank_is_refused():
    world = World(2)
    gather = Request("g", "all_gather", "float32", (2,), 4)
    world.submit(gather)
    world.settle()
    world.machines[1].join()
    world.cycle()
    world.submit(gather, [0])
    (error,) = errors(world.cycle())
    assert "but a rank has called join" in error


@pytest.mark.parametrize("late", [False, True])
def test_what_a_rank_leaves_in_flight_when_it_joins_is_carried_out_with_those_that_have(late):
    world = World(3)
    world.submit(reduce("a"))
    assert world.settle() == [["a"]]
    for rank in (1, 2):
        world.machines[rank].join()
    world.cycle()
    world.submit(reduce("b"), [0])
    opened = [machine.open(0.0) for machine in world.machines] if late else None
    world.submit(reduce("a"), [0])  # its bit says nothing: all would stand in
    world.machines[0].join()
    found = [world.cycle(opened), world.cycle()]
    carried = [n for outcome in found for b in outcome.batches for n in names(b.responses)]
    assert carried == ["b", "a"]
    assert max(outcome.last_joined for outcome in found) == 0
    assert [machine.num_pending for machine in world.machines] == [0, 0, 0]


def test_a_group_of_which_one_is_refused_is_refused_as_a_whole():
    world = World(2)
    for _ in range(2):  # from lists, and once more after agreement
        for rank in range(2):
            world.submit(reduce("a", group="g", group_size=2), [rank])
            world.submit(reduce("b", (4 + rank,), group="g", group_size=2), [rank])
        world.submit(reduce("c"))
        outcome = world.cycle()
        first, second = errors(outcome)
        assert first.startswith("all operations of group 'g' fail, because 'b' failed: ")
        assert "disagree on the shape of 'b'" in first
        assert "disagree on the shape of 'b'" in second
        assert sorted(names(batch.responses) for batch in outcome.batches) == [["a"], ["b"], ["c"]]
        for name in "ab":
            world.submit(reduce(name, group="g", group_size=2))
        assert world.settle() == [["a", "b"]]


@pytest.mark.parametrize("known", [False, True])
def test_ranks_that_put_different_names_into_a_group_hear_it_instead_of_waiting(known):
    world = World(2)
    three = [reduce(name, group="g", group_size=3) for name in "abc"]
    if known:
        for request in three:
            world.submit(request)
        assert world.settle() == [["a", "b", "c"]]
    for request in three:
        world.submit(request, [0])
    for name in "ab":
        world.submit(reduce(name, group="g", group_size=2), [1])
    found = errors(world.cycle())
    assert len(found) == 3
    assert "disagree on the group of 'a': ('g', 3) on rank 0; ('g', 2) on rank 1" in found[0]
    assert [machine.num_pending for machine in world.machines] == [0, 0]


@pytest.mark.parametrize("joined", [False, True])
def test_what_is_still_to_come_of_a_refused_group_is_refused_as_well(joined):
    world = World(3)
    if joined:
        world.machines[2].join()
    others = [1] if joined else [1, 2]
    for name in "abc":
        world.submit(reduce(name, group="g", group_size=3), [0])
    world.submit(reduce("a", group="g", group_size=2), others)
    assert "disagree on the group of 'a'" in errors(world.cycle())[0]
    assert world.settle() == []  # b may come
    world.submit(reduce("b", group="g", group_size=2), others)  # and so c will not
    assert len(errors(world.cycle())) == 2
    assert [machine.num_pending for machine in world.machines] == [0, 0, 0]
    for name in "abc":
        world.submit(reduce(name, group="g", group_size=3), [0, *others])
    assert world.settle() == [["a", "b", "c"]]


def test_a_group_that_has_changed_once_is_known_from_then_on():
    world = World(2)
    for pair in ("ab", "ac", "ac", "ac"):
        for name in pair:
            world.submit(reduce(name, group="g", group_size=2))
        assert list(map(sorted, world.settle())) == [[*pair]]
    assert world.num_lists == 2


def test_a_group_whose_members_change_within_one_exchange_has_only_the_new_ones():
    world = World(2)
    for name in "ab":
        world.submit(reduce(name, group="g", group_size=2))
    world.settle()
    world.submit(reduce("x"))
    opened = [machine.open(0.0) for machine in world.machines]
    for name in "cd":
        world.submit(reduce(name, group="g", group_size=2))
    assert len(world.cycle(opened).batches) == 2
    world.submit(reduce("a", group="g", group_size=2))
    world.submit(reduce("b", group="g", group_size=2), [0])
    assert world.settle() == []
    world.submit(reduce("b", group="g", group_size=2), [1])
    assert world.settle() == [["a", "b"]]


def test_groups_may_be_divided_by_the_limit():
    world = World(2, StateOptions(threshold_bytes=32, split_groups=True))
    for name in "abc":
        world.submit(reduce(name, group="g", group_size=3))
    world.submit(reduce("d"))
    assert world.settle() == [["a", "b"], ["c", "d"]]


def test_what_is_submitted_again_is_news_for_the_others():
    world = World(2, StateOptions(cache_capacity=1))
    for name in "aaaba":  # by list, by bit, in the place of another, and back
        assert not any(machine.has_new for machine in world.machines)
        world.submit(reduce(name))
        assert all(machine.has_new for machine in world.machines)
        assert [names(batch.responses) for batch in world.cycle().batches] == [[name]]


def test_a_position_that_is_taken_by_another_name_means_that_name():
    world = World(2, StateOptions(cache_capacity=1))
    for name in "aabbaab":
        world.submit(reduce(name))
        assert world.settle() == [[name]]
    assert world.num_lists == 4


def test_the_cache_keeps_what_was_used_last():
    world = World(2, StateOptions(cache_capacity=2))
    for name in "abac":  # c takes the place of b
        world.submit(reduce(name))
        world.settle()
    before = world.num_lists
    world.submit(reduce("a"))
    assert world.settle() == [["a"]]
    assert world.num_lists == before


def test_another_limit_holds_for_what_was_agreed_on_before():
    world = World(2)
    for limit, expected in ((None, [["a", "b"]]), (0, [["a"], ["b"]]), (1 << 20, [["a", "b"]])):
        if limit is not None:
            world.machines[0].propose(Settings(limit, 0.002))
            assert world.cycle().cycle_time_s == 0.002
        for _ in range(2):
            for name in "ab":
                world.submit(reduce(name))
            assert world.settle() == expected


def test_ranks_that_have_joined_are_not_told_to_be_missing():
    world = World(3, StateOptions(stall_check_s=60.0))
    world.machines[2].join()
    world.submit(reduce("a"), [0])
    world.cycle()
    world.now_s = 61.0
    (stall,) = world.cycle().stalls
    assert (stall.present, stall.missing) == ((0,), (1,))


def test_names_that_leave_a_group_or_move_to_another_are_agreed_on_anew():
    world = World(2)

    def step(**groups: str) -> list[list[str]]:
        sizes = Counter(groups.values())
        for name, group in groups.items():
            size = sizes[group] if group else 0
            world.submit(reduce(name, group=group, group_size=size))
        return sorted(map(sorted, world.settle()))

    assert step(a="g", b="g") == [["a", "b"]]
    assert step(c="g", d="g") == [["c", "d"]]  # the group has other members: a and b are forgotten
    assert step(a="g", b="g", c="", d="") == [["a", "b"], ["c", "d"]]
    assert step(a="g", c="g", b="h", d="h") == [["a", "c"], ["b", "d"]]
    assert step(a="g", d="g") == [
        ["a", "d"]
    ]  # one has stayed, and waits for what is not a member now
    assert step(a="", b="", c="", d="") == [["a", "b", "c", "d"]]
    world.submit(reduce("a", group="g", group_size=2))
    assert world.settle() == []
    world.submit(reduce("b", group="g", group_size=2))
    assert world.settle() == [["a", "b"]]


def test_what_is_forgotten_with_a_group_can_still_be_asked_for_in_another_way():
    world = World(2)
    for pair in ("ab", "cd"):
        for name in pair:
            world.submit(reduce(name, group="g", group_size=2))
        world.settle()
    world.submit(reduce("a", group="g", group_size=2), [0])  # as it was
    world.submit(reduce("a"), [1])
    assert "disagree on the group of 'a'" in errors(world.cycle())[0]
    assert [machine.num_pending for machine in world.machines] == [0, 0]


def test_only_a_limit_for_the_end_is_enough_to_end_what_is_in_the_cache():
    world = World(2, StateOptions(stall_check_s=0.0, stall_shutdown_s=10.0))
    world.submit(reduce("a"))
    world.settle()
    world.submit(reduce("a"), [1])
    world.cycle()
    world.now_s = 11.0
    assert "submitted by rank 1, not by rank 0" in world.cycle().stop


@pytest.mark.parametrize("known", [False, True])
def test_what_waits_for_long_is_told_with_who_has_it_and_who_has_not(known):
    world = World(3, StateOptions(stall_check_s=60.0, stall_shutdown_s=150.0))
    if known:
        world.submit(reduce("a"))
        world.settle()
    world.submit(reduce("a"), [0])
    world.cycle()
    world.now_s = 30.0
    world.submit(reduce("a"), [2])
    assert not world.cycle().stalls
    world.now_s = 61.0
    (stall,) = world.cycle().stalls
    assert (
        str(stall) == "'a' has waited for 61 s: submitted by rank 0, 2, not by rank 1" or not known
    )
    if not known:
        assert str(stall).endswith("submitted by rank 0, 2, not by rank 1")
    assert not world.cycle().stalls
    world.now_s = 121.0
    assert len(world.cycle().stalls) == 1
    world.now_s = 151.0
    assert "stalled for more than 150 s: 'a'" in world.cycle().stop


def test_one_rank_that_stops_ends_it_for_all_and_says_who():
    world = World(2)
    world.machines[1].stop("rank 1 has shut down")
    assert world.cycle().stop == "rank 1 has shut down"


# Random orders.


def _requests(random_: random.Random, number: int) -> list[Request]:
    """One step's: mostly those of other steps, some of other shapes, some in groups."""
    found = []
    for index in range(random_.randint(1, 6)):
        name = f"t{random_.randint(0, 9)}" if random_.random() < 0.7 else f"s{number}.{index}"
        shape = (random_.choice([1, 1, 1, 2]),)
        found.append(reduce(name, shape))
    unique = list({request.name: request for request in found}.values())
    if random_.random() < 0.3:
        size = len(unique)
        unique = [
            reduce(f"g.{r.name}", r.shape, group=f"g{number}", group_size=size) for r in unique
        ]
    return unique


def _interleaved(seed: int) -> None:
    """Each rank submits each step's requests in an order of its own, while cycles go on."""
    random_ = random.Random(seed)
    size, num_steps = random_.choice([1, 2, 3, 4]), 6
    options = StateOptions(
        cache_capacity=random_.choice([0, 1, 3, 8, 64]),
        threshold_bytes=random_.choice([0, 8, 1 << 20]),
    )
    world = World(size, options)
    steps = [_requests(random_, number) for number in range(num_steps)]
    leaves_early = random_.randrange(size) if size > 1 and random_.random() < 0.3 else -1
    todo: list[list[list[Request]]] = []
    for rank in range(size):
        own = steps if rank != leaves_early else steps[: random_.randint(0, num_steps - 1)]
        todo.append([random_.sample(step, len(step)) for step in own])
    in_flight: list[set[str]] = [set() for _ in range(size)]
    done: Counter[str] = Counter()
    last = -1
    for _ in range(2000):
        opened = []
        for rank in random_.sample(range(size), size):
            machine = world.machines[rank]
            for late in (False, True):
                for _ in range(random_.randint(0, 3)):
                    _submit_next(machine, todo[rank], in_flight[rank])
                if not late:
                    opened.append((rank, machine.open(0.0)))
        outcome = world.cycle([word for _, word in sorted(opened)])
        for batch in outcome.batches:
            for response in batch.responses:
                assert not response.error
                done[response.name] += 1
                for rank in range(size):
                    in_flight[rank].discard(response.name)
        last = max(last, outcome.last_joined)
        if last >= 0:
            break
    assert last >= 0, (seed, world.machines, todo)
    assert done == Counter(request.name for step in steps for request in step)
    assert all(machine.num_pending == 0 for machine in world.machines)


def _submit_next(machine: FusionState, todo: list[list[Request]], in_flight: set[str]) -> None:
    """The next request of a rank, which begins a step when all of the last one is done, as training does."""
    if todo and not todo[0] and not in_flight:
        todo.pop(0)
    if todo and todo[0]:
        request = todo[0].pop()
        in_flight.add(request.name)
        machine.submit(request, 0.0)
    elif not todo and not machine._joined:
        machine.join()


@pytest.mark.parametrize("seed", range(40))
def test_interleavings_carry_out_everything_once_in_one_order(seed):
    _interleaved(seed)


@pytest.mark.proof
def test_thousands_of_interleavings_carry_out_everything_once_in_one_order():
    for seed in range(40, 4040):
        _interleaved(seed)


# Random orders, with ranks that differ, groups that change, waiting that is told, and an end.


@dataclass
class Step:
    """What ranks submit in one step, each by groups that it submits at once; and which names are refused."""

    by_rank: list[list[list[Request]]]
    refused: set[str]


def _troubled_step(random_: random.Random, size: int) -> Step:
    names = random_.sample([f"t{number}" for number in range(8)], random_.randint(1, 6))
    groups = random_.sample(["g", "h", "i"], 3)
    by_rank: list[list[list[Request]]] = [[] for _ in range(size)]
    refused: set[str] = set()
    while names:
        count = random_.randint(1, len(names))
        chunk, names = names[:count], names[count:]
        group = groups.pop() if groups and random_.random() < 0.5 else ""
        odd = random_.randrange(size) if size > 1 and random_.random() < 0.3 else -1
        how = random_.choice(["shape", "group"])
        strange = random_.choice(chunk)
        if odd >= 0 and how == "group":
            refused.update(chunk)
        elif odd >= 0:
            refused.update(chunk if group else [strange])
        for rank in range(size):
            own = f"odd {strange}" if rank == odd and how == "group" else group
            shapes = {strange: (3,)} if rank == odd and how == "shape" else {}
            requests = [
                reduce(n, shapes.get(n, (1,)), group=own, group_size=count if own else 0)
                for n in chunk
            ]
            if own:
                by_rank[rank].append(random_.sample(requests, count))
            else:
                by_rank[rank] += [[request] for request in requests]
    return Step([random_.sample(chunks, len(chunks)) for chunks in by_rank], refused)


class Troubled:
    """A world in which each rank submits each step's requests in an order of its own, while cycles go on.

    In the end all join, or one of them stops.
    """

    def __init__(self, seed: int) -> None:
        random_ = self.random = random.Random(seed)
        size = random_.choice([1, 2, 3, 4])
        options = StateOptions(
            cache_capacity=random_.choice([0, 1, 3, 8, 64]),
            threshold_bytes=random_.choice([0, 8, 1 << 20]),
            split_groups=random_.random() < 0.3,
            stall_check_s=random_.choice([0.0, 4.0, 1000.0]),
            stall_shutdown_s=random_.choice([0.0, 1e6]),
        )
        self.world = World(size, options)
        steps = [_troubled_step(random_, size) for _ in range(8)]
        self.stops = random_.randrange(size) if random_.random() < 0.5 else -1
        self.todo = [[list(step.by_rank[rank]) for step in steps] for rank in range(size)]
        self.refused: dict[str, list[bool]] = {}  # by name, in the order of steps
        for step in steps:
            for name in {request.name for chunk in step.by_rank[0] for request in chunk}:
                self.refused.setdefault(name, []).append(name in step.refused)
        self.in_flight: list[set[str]] = [set() for _ in range(size)]

    def run(self) -> CycleOutcome:
        for _ in range(2000):
            outcome = self.cycle()
            if outcome.stop or outcome.last_joined >= 0:
                return outcome
        pytest.fail(f"nothing ended: {self.world.machines}, {self.todo}")

    def cycle(self) -> CycleOutcome:
        world, random_ = self.world, self.random
        opened: dict[int, bytes] = {}
        world.now_s += random_.choice([0.0, 0.5, 2.0])
        for rank in random_.sample(range(world.size), world.size):
            for _ in range(random_.randint(0, 3)):
                self.submit(rank)
            opened[rank] = world.machines[rank].open(world.now_s)
        before = [set(names) for names in self.in_flight]
        for rank in random_.sample(range(world.size), world.size):
            for _ in range(random_.randint(0, 2)):
                self.submit(rank)
        waiting = [set(names) for names in self.in_flight]
        outcome = world.cycle([word for _, word in sorted(opened.items())])
        for response in [r for batch in outcome.batches for r in batch.responses]:
            assert bool(response.error) is self.refused[response.name].pop(0), response
            for names in self.in_flight:
                names.discard(response.name)
        for stall in outcome.stalls:
            assert all(stall.name in waiting[rank] for rank in stall.present)
            assert not any(stall.name in before[rank] for rank in stall.missing)
        return outcome

    def submit(self, rank: int) -> None:
        own, machine, in_flight = self.todo[rank], self.world.machines[rank], self.in_flight[rank]
        if own and not own[0] and (not in_flight or len(own) == 1):
            own.pop(0)  # whoever has submitted the last step joins at once
        if own and own[0]:
            for request in own[0].pop():
                in_flight.add(request.name)
                machine.submit(request, self.world.now_s)
        elif not own and self.stops < 0 and not machine._joined:
            machine.join()
        elif not own and rank == self.stops and not in_flight:
            machine.stop("the end")


def _troubled(seed: int) -> None:
    """All that was submitted by all is carried out or refused, as it has to be."""
    troubled = Troubled(seed)
    outcome = troubled.run()
    assert (outcome.stop == "the end") is (troubled.stops >= 0)
    assert not any(troubled.refused.values())
    assert all(machine.num_pending == 0 for machine in troubled.world.machines)


@pytest.mark.parametrize("seed", range(40))
def test_interleavings_with_ranks_that_differ_end_as_they_must(seed):
    _troubled(seed)


@pytest.mark.proof
def test_thousands_of_interleavings_with_ranks_that_differ_end_as_they_must():
    for seed in range(40, 4040):
        _troubled(seed)
