"""Claims of the parts of key-value programs: groups, slices, filters, memory of requests, members, store."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.compat.pslite.environment import Environment
from braid.errors import CommError, ConfigError
from braid.ps import kv
from braid.ps.kv.filters import digest_of
from braid.ps.kv.groups import ALL, NUM_KEYS, id_of, key_ranges, members_of, node_of
from braid.ps.kv.pairs import as_keys
from braid.ps.kv.parcel import Parcel
from braid.ps.kv.protocol.executed import Executed, RequestProgress, RequestStream
from braid.ps.kv.protocol.members_state import KVMembersState, Refuse
from braid.ps.kv.slicers import KeyLayout
from braid.ps.kv.store import SumStore
from braid.ps.protocol.members_state import PublishDirectory, ReleaseNodes

ANY_KEYS = st.lists(st.integers(0, NUM_KEYS - 1), unique=True, max_size=40).map(sorted)


# -- groups and slices


@given(st.integers(1, 40))
def test_ranges_cover_all_keys_and_differ_by_one_at_most(servers):
    ranges = key_ranges(servers)
    assert [first for first, _ in ranges] == [0, *[end for _, end in ranges[:-1]]]
    assert ranges[-1][1] == NUM_KEYS
    sizes = {end - first for first, end in ranges}
    assert max(sizes) - min(sizes) <= 1


def test_nodes_have_the_numbers_of_pslite():
    nodes = members_of(ALL, 3, 2)
    assert [id_of(node) for node in nodes] == [1, 8, 10, 12, 9, 11]
    assert [node_of(id_of(node)) for node in nodes] == nodes
    assert id_of("worker:100000") == 200009, "no two nodes have one number, however many there are"


@given(ANY_KEYS, st.integers(1, 9), st.sampled_from([kv.by_range, kv.by_hash]))
def test_each_key_has_one_server_and_stays_sorted(numbers, servers, slicer):
    keys = as_keys(numbers)
    seen = []
    for server, places in slicer(keys, servers).items():
        own = np.array(numbers, dtype=np.uint64)[
            places if isinstance(places, slice) else places.numpy()
        ]
        assert len(own)
        assert (own[1:] > own[:-1]).all()
        seen += own.tolist()
        if slicer is kv.by_range:
            first, end = key_ranges(servers)[server]
            assert all(first <= key < end for key in own.tolist())
    assert sorted(seen) == numbers


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_values_are_gathered_and_scattered_by_their_lengths(lens, data):
    total = sum(lens)
    vals = torch.arange(total)
    layout = KeyLayout(len(lens), total, torch.tensor(lens))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(lens), max_size=len(lens))))
    groups = vals.split(lens)
    out = torch.full([total], -1)
    for places in (mask.nonzero().flatten(), (~mask).nonzero().flatten()):
        own = layout.gather(vals, places)
        assert own.tolist() == [v for place in places.tolist() for v in groups[place].tolist()]
        layout.scatter(out, places, own)
    assert torch.equal(out, vals)


# -- filters


def _parcel(vals: torch.Tensor) -> Parcel:
    return Parcel({"keys": as_keys(range(len(vals))), "vals": vals.clone()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_compression_changes_no_bit(dtype):
    vals = (torch.arange(500) % 7).to(dtype)
    parcel, zipped = _parcel(vals), kv.Compression(9)
    before = parcel.nbytes
    zipped.encode(parcel, 0)
    assert zipped.saved_bytes == before - parcel.nbytes > 0
    parcel.decode()
    assert torch.equal(parcel.tensors["vals"], vals)
    assert parcel.tensors["keys"].tolist() == list(range(500))


def test_bytes_that_do_not_compress_are_sent_as_they_are():
    noise = torch.randint(
        0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    parcel = Parcel({"vals": noise})
    kv.Compression().encode(parcel, 0)
    assert parcel.heads == []


@pytest.mark.parametrize(("bits", "share"), [(8, 3), (16, 2)])
def test_fixed_point_is_right_on_average_and_a_function_of_the_seed(bits, share):
    vals = torch.linspace(-2, 3, 200)
    step = 3 / ((1 << (bits - 1)) - 1)
    fixed, again, total = kv.FixedPoint(bits, seed=1), kv.FixedPoint(bits, seed=1), torch.zeros(200)
    for _ in range(100):
        parcel, twin = _parcel(vals), _parcel(vals)
        fixed.encode(parcel, 0)
        again.encode(twin, 0)
        assert torch.equal(parcel.tensors["vals"], twin.tensors["vals"])
        parcel.decode()
        assert (parcel.tensors["vals"] - vals).abs().max() <= 1.001 * step
        total += parcel.tensors["vals"]
    assert (total / 100 - vals).abs().max() < 0.3 * step  # 6 deviations of a mean of 100
    assert fixed.saved_bytes == 100 * 200 * share if bits == 8 else 100 * 200 * 2


def test_fixed_point_leaves_integers_and_refuses_what_is_no_number():
    parcel = _parcel(torch.arange(4))
    kv.FixedPoint().encode(parcel, 0)
    assert parcel.heads == []
    with pytest.raises(ConfigError, match="FixedPoint cannot encode nan, the value at index 1"):
        kv.FixedPoint().encode(_parcel(torch.tensor([1.0, float("nan")])), 0)


def test_what_top_k_leaves_out_is_sent_later():
    top, total = kv.TopK(0.25), torch.zeros(8)
    vals = torch.tensor([0.1, -5.0, 0.2, 3.0, 0.3, 0.4, -0.5, 0.6])
    for turn in range(40):
        parcel = _parcel(vals)
        top.encode(parcel, 0)
        assert len(parcel.tensors["vals"]) == 2
        parcel.decode()
        total += parcel.tensors["vals"]
        if not turn:
            assert total.tolist() == [0, -5, 0, 3, 0, 0, 0, 0]
    left = 40 * vals - total
    assert left.abs().max() < 11, "no value is kept back for ever"
    assert top.saved_bytes == 40 * (32 - 2 * (4 + 4))


def test_keys_are_replaced_by_their_digest_from_the_second_time_on():
    cache = kv.KeyCache(capacity=1)
    first, second, other, third = (_parcel(torch.ones(n)) for n in (4, 4, 5, 4))
    for parcel in (first, second, other, third):
        cache.encode(parcel, 0)
    assert [("keys" in parcel.tensors) for parcel in (first, second, other, third)] == [
        True,
        False,
        True,
        True,
    ]
    assert second.digest == digest_of(first.tensors["keys"])
    assert cache.saved_bytes == 4 * 8 - 16
    elsewhere = _parcel(torch.ones(4))
    cache.encode(elsewhere, 1)
    assert "keys" in elsewhere.tensors, "each server has keys of its own"


def test_filters_compose_in_their_order():
    vals = torch.arange(64.0)
    parcel = _parcel(vals)
    for each in (kv.KeyCache(), kv.TopK(0.5), kv.FixedPoint(16), kv.Compression()):
        each.encode(parcel, 0)
    parcel.decode()
    assert torch.equal(parcel.tensors["vals"][:32], torch.zeros(32))
    assert torch.allclose(parcel.tensors["vals"][32:], vals[32:], atol=0.01)
    mixed = _parcel(vals)
    kv.Compression().encode(mixed, 0)
    with pytest.raises(ConfigError, match="put it before Compression"):
        kv.KeyCache().encode(mixed, 0)


@pytest.mark.parametrize(
    "make",
    [lambda: kv.Compression(0), lambda: kv.FixedPoint(4), lambda: kv.TopK(0), lambda: kv.TopK(1.5)],
)
def test_filters_refuse_options_that_cannot_be(make):
    with pytest.raises(ConfigError):
        make()


# -- requests that have been executed


def test_a_request_is_new_once_and_forgotten_when_its_answer_was_seen():
    executed, stream = Executed(), RequestStream("worker:0", 1, 0, 0)
    assert executed.begin(stream, 0, 0) is RequestProgress.NEW
    assert executed.begin(stream, 0, 0) is RequestProgress.UNDER_WAY
    assert executed.finish(stream, 0, "a")
    assert not executed.finish(stream, 0, "b")
    assert executed.begin(stream, 0, 0) == "a"
    assert executed.begin(stream, 2, 0) is RequestProgress.NEW
    assert executed.begin(stream, 1, 1) is RequestProgress.NEW
    assert executed.num_remembered == 2
    assert executed.begin(stream, 0, 0) is RequestProgress.OVER
    executed.cancel(stream, 1)
    assert executed.begin(stream, 1, 1) is RequestProgress.NEW


def test_streams_of_different_customers_and_lives_do_not_meet():
    executed = Executed()
    streams = [
        RequestStream(f"worker:{n}", 1, app, c)
        for n in range(200)
        for app in range(2)
        for c in range(2)
    ]
    assert all(executed.begin(each, 0, 0) is RequestProgress.NEW for each in streams)
    later = RequestStream("worker:0", 2, 0, 0)
    assert executed.begin(later, 0, 0) is RequestProgress.NEW
    assert executed.begin(streams[0], 5, 0) is RequestProgress.OVER, "of a life that is over"
    assert executed.num_remembered == len(streams) - 4 + 1
    assert executed.finish(streams[0], 0, "nobody waits for it")


# -- members


def _complete() -> KVMembersState[str]:
    state: KVMembersState[str] = KVMembersState(1, 2)
    assert state.joins("server:0", 1, "a") == []
    assert state.joins("worker:0", 1, "b") == []
    assert state.absent == ["worker:1"]
    assert state.joins("worker:1", 1, "c") == [PublishDirectory(state.directory)]
    assert state.directory.nodes == {"server:0": "a", "worker:0": "b", "worker:1": "c"}
    return state


def test_barriers_open_when_all_have_come_and_never_for_the_lost():
    state = _complete()
    assert state.enters("worker:0", 0, 4, "first") == []
    assert state.enters("worker:0", 1, 4, "other") == []
    assert state.enters("worker:1", 0, 4, "second") == [ReleaseNodes(("first", "second"))]
    assert state.waiting() == ["barrier of group 4 lacks worker:1"]
    refused, published = state.loses("worker:1", "killed")
    assert refused == Refuse(
        ("other",), "the barrier of group 4 cannot open: worker:1 is lost (killed)"
    )
    assert published == PublishDirectory(state.directory)
    assert state.directory.lost_nodes == {"worker:1": "killed"}
    assert isinstance(state.enters("worker:0", 0, 4, "late")[0], Refuse)
    assert state.enters("server:0", 0, 2, "alone") == [ReleaseNodes(("alone",))]
    with pytest.raises(CommError, match="worker:0 is not a member of group 2"):
        state.enters("worker:0", 0, 2, "")
    assert not state.is_over
    state.departs("server:0")
    state.departs("worker:0")
    assert state.is_over


def test_a_node_comes_back_and_another_process_cannot_be_it():
    state = _complete()
    state.loses("worker:0", "cut off")
    assert state.joins("worker:0", 1, "b") == [PublishDirectory(state.directory)]
    assert state.lost == state.directory.lost_nodes == {}
    assert state.joins("worker:0", 1, "b") == []
    with pytest.raises(CommError, match="worker:0 is here already"):
        state.joins("worker:0", 2, "b")
    with pytest.raises(
        CommError, match="server:1 does not belong to the run, which has 1 servers, 2 workers"
    ):
        state.joins("server:1", 1, "")


def test_candidates_get_numbers_until_there_are_enough():
    state: KVMembersState[str] = KVMembersState(1, 2)
    assert [state.number(f"candidate:{n}", "worker") for n in (7, 8, 7)] == [0, 1, 0]
    with pytest.raises(CommError, match="the run already has all its 2 workers"):
        state.number("candidate:9", "worker")
    with pytest.raises(CommError, match="unknown role 'judge'"):
        state.number("candidate:9", "judge")


# -- the store


@given(st.lists(ANY_KEYS.filter(len), min_size=1, max_size=8))
def test_the_store_sums_as_a_dict_does(pushes):
    store, expected = SumStore(), {}
    for turn, numbers in enumerate(pushes):
        ids = kv.KVPairs(numbers).ids
        store.add(ids, torch.full((len(numbers), 2), float(turn + 1)))
        for number in numbers:
            expected[number] = expected.get(number, 0) + turn + 1
    numbers = sorted({*expected, 0, NUM_KEYS - 1})
    rows = store.read(kv.KVPairs(numbers).ids, 2, torch.float32)
    assert rows.tolist() == [[expected.get(number, 0)] * 2 for number in numbers]
    assert len(store) == len(expected)


# -- the environment of PS-Lite's programs

BY_HAND = {
    "DMLC_ROLE": "server",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "8000",
    "DMLC_NUM_SERVER": "2",
    "DMLC_NUM_WORKER": "3",
}


def test_the_environment_is_read():
    own = Environment.parse(
        BY_HAND | {"PS_RESEND": "1", "PS_RESEND_TIMEOUT": "200", "PS_DROP_MSG": "10"}
    )
    assert (own.role, own.num_servers, own.num_workers, own.port) == ("server", 2, 3, 8000)
    assert (own.resend_s, own.drop, own.is_one_host, own.is_launched) == (0.2, 0.1, True, False)
    launched = Environment.parse({"BRAID_SERVERS": "2", "RANK": "1", "DMLC_NUM_WORKER": "9"})
    assert (launched.is_launched, launched.num_servers) == (True, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"DMLC_ROLE": "joint"}, "DMLC_ROLE must be one of scheduler, server, worker, got 'joint'"),
        ({"DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER must be a positive number, got '0'"),
        ({"DMLC_PS_ROOT_PORT": "x"}, "DMLC_PS_ROOT_PORT must be a positive number, got 'x'"),
        ({"DMLC_PS_ROOT_URI": ""}, "DMLC_PS_ROOT_URI is not set"),
        ({"DMLC_PS_ROOT_URI": "10.0.0.1"}, "nodes at 10.0.0.1 can be reached by other hosts"),
        (
            {"PS_DROP_MSG": "10"},
            "PS_DROP_MSG needs PS_RESEND=1, as dropped requests are otherwise lost",
        ),
        ({"PS_DROP_MSG": "100"}, "PS_DROP_MSG must be a percentage from 0 to below 100, got 100"),
        ({"PS_HEARTBEAT_TIMEOUT": "soon"}, "PS_HEARTBEAT_TIMEOUT must be a number, got 'soon'"),
    ],
)
def test_what_is_wrong_in_the_environment_is_named(changes, text):
    with pytest.raises(ConfigError) as caught:
        Environment.parse(BY_HAND | changes)
    assert text in str(caught.value)
