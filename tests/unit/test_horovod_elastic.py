"""Claims of `hvd.elastic`: each sample once per epoch, and one commit from which all go on."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from braid.compat.horovod.torch.elastic import (
    ElasticSampler,
    ObjectState,
    State,
    TorchState,
    sampler,
)
from braid.compat.horovod.torch.elastic.loop import adopt, train_with
from braid.compat.horovod.torch.elastic.members import NEVER, MemberReport
from braid.errors import CommError, ConfigError


def _samplers(num_samples: int, num_ranks: int, state: dict, *, shuffle: bool = True):
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "size", lambda: num_ranks)
        for rank in range(num_ranks):
            patch.setattr(sampler, "rank", lambda rank=rank: rank)
            made.append(ElasticSampler(range(num_samples), shuffle=shuffle))
            made[-1].load_state_dict(state)
    return made


def _batches(given: ElasticSampler, batch_size: int) -> list[list[int]]:
    indices = list(given)
    assert len(indices) == len(given)
    return [indices[n : n + batch_size] for n in range(0, len(indices), batch_size)]


@given(
    num_samples=st.integers(1, 60),
    phases=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6
    ),
    batch_size=st.integers(1, 7),
    shuffle=st.booleans(),
)
def test_each_sample_comes_once_in_an_epoch_whatever_the_numbers_of_members(
    num_samples, phases, batch_size, shuffle
):
    """Phases: members, batches until members change, and a member that dies then."""
    state = {"epoch": 2, "processed_indices": set()}
    processed: Counter[int] = Counter()
    for num_ranks, num_batches, dead in [*phases, (3, 10**6, 0)]:
        ranks = _samplers(num_samples, num_ranks, state, shuffle=shuffle)
        by_rank = [_batches(each, batch_size) for each in ranks]
        assert len({len(batches) for batches in by_rank}) == 1, "collectives would not match"
        for number in range(min(num_batches, len(by_rank[0]))):
            for each, batches in zip(ranks, by_rank, strict=True):
                processed.update(batches[number])
                each.record_batch(number, batch_size)
        alive = [each for n, each in enumerate(ranks) if n != dead] or ranks
        known = set().union(*(each.state_dict()["processed_indices"] for each in alive))
        assert known == set(processed)
        state = {"epoch": 2, "processed_indices": known}
        if len(processed) < num_samples:
            assert set(processed.values()) <= {1}
    assert len(processed) == num_samples
    assert sum(processed.values()) - num_samples < 5, "at most one more for each other rank"


def test_a_sampler_has_horovods_names_and_orders(monkeypatch):
    monkeypatch.setattr(sampler, "size", lambda: 2)
    monkeypatch.setattr(sampler, "rank", lambda: 0)
    (first, second) = _samplers(8, 2, {"epoch": 0, "processed_indices": set()}, shuffle=False)
    assert (list(first), list(second)) == ([0, 2, 4, 6], [1, 3, 5, 7])
    first.record_batch(0, 2)
    second.record_indices([5])
    assert (first.processed_indices, second.processed_indices) == ({0, 2}, {5})
    assert first.get_indices(1, 2) == [4, 6]
    assert first.state_dict() == {"epoch": 0, "processed_indices": {0, 1, 2, 3}}
    first.set_epoch(1)
    assert first.state_dict() == {"epoch": 1, "processed_indices": set()}


class _Members:
    """Members of which this one is rank 0; the others' reports come from a script."""

    def __init__(self, *epochs, may_change: bool = True, is_newcomer: bool = False) -> None:
        self.epochs = list(epochs)
        self.may_change, self.is_newcomer = may_change, is_newcomer
        self.numbers = (0,)
        self.updates = False
        self.given: list[MemberReport] = []

    def agree_on_update(self) -> bool:
        if isinstance(self.updates, Exception):
            raise self.updates
        return self.updates

    def join_next(self, report: MemberReport) -> list[MemberReport]:
        self.given.append(report)
        self.is_newcomer = False
        self.updates = False
        others = self.epochs.pop(0)
        if isinstance(others, Exception):
            raise others
        self.numbers = (*self.numbers, len(self.epochs))
        return [report, *others]


def _state(**values) -> ObjectState:
    return ObjectState(bcast_object=lambda value: value, get_rank=lambda: 0, **values)


LOST = HorovodInternalError("rank 1 was lost")


def test_a_loss_brings_back_the_last_commit_and_calls_the_callbacks():
    state, members, seen = _state(batch=0), _Members([]), []
    state.register_reset_callbacks([lambda: seen.append("reset")])
    calls = []

    def func() -> str:
        calls.append(state.batch)
        if len(calls) == 2:
            return "end"
        state.batch = 1
        state.commit()
        state.batch = 2
        raise LOST

    assert train_with(members, state, func) == "end"
    assert (calls, seen) == ([0, 1], ["reset"])
    assert members.given == [MemberReport(1)], "sync and commit have saved"
    assert state.members is None


class Weights(State):
    """A state of a program, made as with Horovod's base class."""

    def __init__(self) -> None:
        super().__init__(bcast_object=lambda value: value, get_rank=lambda: 0)
        self.value = self.saved = 0

    def save(self) -> None:
        self.saved = self.value

    def restore(self) -> None:
        self.value = self.saved

    def sync(self) -> None:
        self.commit()


def test_a_subclass_of_the_base_state_passes_its_functions_to_it():
    state, members, seen = Weights(), _Members([]), []

    def func() -> int:
        seen.append(state.value)
        if len(seen) == 2:
            return state.value
        state.value = 1
        raise LOST

    assert train_with(members, state, func) == 0
    assert seen == [0, 0]


def test_an_update_keeps_the_state_and_a_further_loss_does_not():
    for epochs, expected in (([[]], [0, 5]), ([LOST, []], [0, 5])):
        state, members, calls = _state(batch=0), _Members(*epochs), []

        def func(state=state, members=members, calls=calls) -> None:
            calls.append(state.batch)
            if len(calls) < 2:
                state.batch = 5
                members.updates = True
                state.check_host_updates()

        train_with(members, state, func)
        assert calls == expected


def test_an_error_passes_where_it_cannot_be_helped():
    def func() -> None:
        raise LOST

    with pytest.raises(HorovodInternalError):
        train_with(_Members(may_change=False), _state(), func)
    members = _Members()
    members.join_next = lambda report: [report]  # the same members
    with pytest.raises(HorovodInternalError):  # and not again and again
        train_with(members, _state(), func)
    with pytest.raises(CommError, match="no new set of ranks follows"):
        train_with(_Members(CommError("no new set of ranks follows")), _state(), func)


def test_a_newcomer_begins_with_the_state_of_the_others_and_without_callbacks():
    members, called = _Members(is_newcomer=True), []
    state = _state(batch=0)
    members.join_next = lambda report: [MemberReport(4, NEVER, True), report]
    state._broadcast = lambda _: {"batch": 9}
    state.register_reset_callbacks([lambda: called.append(1)])
    assert train_with(members, state, lambda: state.batch) == 9
    assert (state.num_commits, called) == (5, [])


LIVE, FAILED = MemberReport(3, NEVER, True), MemberReport(3)


@pytest.mark.parametrize(
    ("own", "others", "batch", "num_commits"),
    [
        (LIVE, [LIVE, MemberReport(NEVER)], 7, 3),  # a newcomer comes
        (LIVE, [FAILED], 3, 3),
        (FAILED, [LIVE], 3, 3),
        (MemberReport(3, 4), [MemberReport(3)], 3, 3),  # nobody has passed the commit
        (MemberReport(3, 4), [MemberReport(4)], 7, 4),  # somebody has
        (MemberReport(3, 4), [MemberReport(4, NEVER, True)], 7, 4),
    ],
)
def test_all_members_go_on_from_one_commit(own, others, batch, num_commits):
    state = _state(batch=3)
    state.num_commits = state.base = 3
    state.batch = 7
    assert adopt(state, own, [own, *others])
    assert (state.batch, state.num_commits) == (batch, num_commits)


def test_members_that_disagree_on_skip_sync_synchronize():
    skips, wants = MemberReport(3, NEVER, True, True), LIVE
    state = _state(batch=3)
    state.num_commits = 3
    assert not adopt(state, skips, [skips, skips])
    for own in (skips, wants):
        assert adopt(state, own, [skips, wants])


def test_a_state_that_nobody_has_is_no_state_to_go_on_from():
    state = _state(batch=3)
    state.base = 5
    with pytest.raises(CommError, match="the state after commit 5 is lost"):
        adopt(state, MemberReport(NEVER), [MemberReport(NEVER)])
    complete = MemberReport(NEVER, 6)  # it had arrived, and its sender died
    assert adopt(state, complete, [complete])
    assert state.num_commits == 6


def test_a_loss_in_a_commit_leaves_a_candidate():
    state, members = _state(batch=0), _Members([MemberReport(1)])
    calls = []

    def func() -> None:
        calls.append(state.batch)
        if len(calls) < 2:
            state.batch = 1
            members.updates = LOST
            state.commit()

    train_with(members, state, func)
    assert members.given == [MemberReport(0, 1)]
    assert calls == [0, 1]


def test_a_torch_state_restores_objects_in_place():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TorchState(model, optimizer, scheduler=scheduler, batch=0, history=[])
    state.save()
    before = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    state.batch = 4
    state.history.append(1)
    state.restore()
    assert torch.equal(model.weight, before)
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (0.1, 0)
    assert not optimizer.state
    assert (state.batch, state.history, state.model is model) == (0, [], True)
    other = torch.nn.Linear(2, 1)
    state.model = other
    state.restore()
    assert state.model is other


def test_a_name_of_the_states_own_is_refused():
    with pytest.raises(ConfigError, match="'commit' is already an attribute of the state class"):
        TorchState(commit=1)


def test_an_interrupt_says_whether_a_sync_is_needed():
    assert (HostsUpdatedInterrupt().skip_sync, HostsUpdatedInterrupt(True).skip_sync) == (
        False,
        True,
    )
