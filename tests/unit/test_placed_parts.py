"""The pure parts of placed models: names of devices, placer, split, rendezvous, tensors as sent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError, InternalError
from braid.strategies.placed.partition import NodeValues, partition, pruned
from braid.strategies.placed.placer import Colocation, PlacerNode, choose_devices
from braid.strategies.placed.rendezvous_state import (
    AnswerAsker,
    DropValue,
    FailAsker,
    RendezvousKey,
    RendezvousState,
)
from braid.strategies.placed.sent_tensor import arrived, sent
from braid.strategies.placed.spec import DeviceSpec, merged

CPUS = [DeviceSpec("worker", None, task, "cpu", 0) for task in range(2)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("/job:worker/task:1/device:CPU:0", "/job:worker/task:1/device:cpu:0"),
        ("/job:ps/replica:0/task:3", "/job:ps/replica:0/task:3"),
        ("/gpu:2", "/device:cuda:2"),
        ("/device:cpu:*", "/device:cpu:*"),
        ("", ""),
    ],
)
def test_a_name_is_read_and_written(text, name):
    assert str(DeviceSpec.parse(text)) == name
    assert DeviceSpec.parse(name) == DeviceSpec.parse(text)


@pytest.mark.parametrize("text", ["cpu:0", "/job:", "/task:x", "/job:a/job:b", "/device:tpu:0"])
def test_a_text_that_names_no_device_is_refused(text):
    with pytest.raises(ConfigError, match="expected fields such as"):
        DeviceSpec.parse(text)


def test_an_inner_scope_replaces_the_fields_that_it_names():
    scopes = ["/job:ps/task:1/device:cpu:0", "/task:2", "/device:cuda:1"]
    assert str(merged(scopes)) == "/job:ps/task:2/device:cuda:1"


def chain(count: int, **specs: str) -> list[PlacerNode]:
    return [
        PlacerNode(
            f"n{i}",
            f"model.py:{i}",
            DeviceSpec.parse(specs.get(f"n{i}", "")),
            1e9,
            {i - 1: 1000} if i else {},
        )
        for i in range(count)
    ]


def test_a_chain_without_constraints_is_cut_once_into_equal_parts():
    chosen = choose_devices(chain(6), [], CPUS)
    assert [device.task for device in chosen] == [0, 0, 0, 1, 1, 1]


def test_nodes_without_constraints_lie_where_their_values_are():
    chosen = choose_devices([node._replace(flops=0.0) for node in chain(4, n0="/task:1")], [], CPUS)
    assert [device.task for device in chosen] == [1, 1, 1, 1]


def test_a_device_that_does_not_exist_is_named_with_the_devices_that_do():
    with pytest.raises(ConfigError) as caught:
        choose_devices(chain(2, n1="/task:7"), [], CPUS)
    assert str(caught.value) == (
        "n1 (model.py:1) is placed on /task:7, which does not exist: the cluster has "
        "/job:worker/task:0/device:cpu:0, /job:worker/task:1/device:cpu:0"
    )


def test_a_conflict_names_both_nodes_devices_and_reasons():
    pairs = [Colocation(0, 1, "they share w"), Colocation(1, 2, "n2 writes to n1")]
    with pytest.raises(ConfigError) as caught:
        choose_devices(chain(3, n0="/task:0", n2="/task:1"), pairs, CPUS)
    assert str(caught.value) == (
        "n0 (model.py:0) is placed on /task:0 and n2 (model.py:2) on /task:1, but they must have "
        "one device: they share w; n2 writes to n1. Give both the same device"
    )


@given(st.lists(st.sampled_from(["", "/task:0", "/task:1"]), min_size=1, max_size=8), st.data())
def test_chosen_devices_keep_constraints_and_colocations(specs, data):
    nodes = chain(len(specs), **{f"n{i}": spec for i, spec in enumerate(specs)})
    index = st.integers(0, len(specs) - 1)
    pairs = data.draw(st.lists(st.tuples(index, index), max_size=4))
    try:
        chosen = choose_devices(nodes, [Colocation(*pair, "why") for pair in pairs], CPUS)
    except ConfigError as exc:
        assert "must have one device" in str(exc)  # noqa: PT017 - a conflict that was drawn
        return
    assert all(node.spec.matches(device) for node, device in zip(nodes, chosen, strict=True))
    assert all(chosen[first] == chosen[second] for first, second in pairs)


NODES = [
    NodeValues((0,), (1,)),
    NodeValues((1,), (2,)),
    NodeValues((1,), (3,)),
    NodeValues((2, 3), (4,)),
    NodeValues((1, 4), (5,)),
    NodeValues((1,), (6,)),
]


def test_nodes_that_no_fetched_value_needs_are_pruned():
    assert pruned(NODES, {5}, {0}) == [0, 1, 2, 3, 4]
    assert pruned(NODES, {4}, {2, 3}) == [3]
    assert pruned([*NODES, NodeValues((), (7,), is_kept=True)], {1}, {0}) == [0, 6]


def test_a_tensor_is_sent_once_to_each_device_and_gradients_return_in_the_order_of_uses():
    first, second = partition(NODES, ["A", "B", "B", "A", "B", "A"], {5}, {0})
    assert [segment.nodes for segment in first.segments] == [(0,), (3,)]
    assert [segment.nodes for segment in second.segments] == [(1, 2), (4,)]
    assert first.segments[0].sends == ((1, "B"),)
    assert second.segments[0].receives == ((1, "A"),)
    assert second.segments[1].receives == ((4, "A"),)  # value 1 is there
    assert second.segments[1].inputs == (1, 4)
    assert [link[:2] for link in second.segments[1].sums_to] == [(1, 1), (4, 2)]
    assert [link[:2] for link in second.segments[0].sums_to] == [(1, 0)]
    assert [link[:2] for link in first.segments[0].sums_from] == [(1, 1)]
    assert first.feeds == {0}
    assert second.segments[1].fetches == (5,)


@given(st.data())
def test_each_edge_has_one_sender_and_one_receiver(data):
    count = data.draw(st.integers(1, 8))
    nodes = [
        NodeValues(tuple(data.draw(st.sets(st.integers(0, i), max_size=3))), (i + 1,))
        for i in range(count)
    ]
    devices = data.draw(st.lists(st.sampled_from("ABC"), min_size=count, max_size=count))
    parts = partition(nodes, devices, {count}, {0})
    sent_edges = sorted(
        (value, part.device, target)
        for part in parts
        for segment in part.segments
        for value, target in segment.sends
    )
    received = sorted(
        (value, source, part.device)
        for part in parts
        for segment in part.segments
        for value, source in segment.receives
    )
    assert sent_edges == received
    assert len(set(sent_edges)) == len(sent_edges)
    links = [
        sorted(
            (link.value, *sorted((segment.number, link.segment)))
            for part in parts
            for segment in part.segments
            for link in getattr(segment, name)
        )
        for name in ("sums_from", "sums_to")
    ]
    assert links[0] == links[1]


def key(step: int = 1, edge: str = "value 3", incarnation: str = "a") -> RendezvousKey:
    return RendezvousKey("/task:0", incarnation, "/task:1", edge, "graph", step)


def test_whichever_comes_first_waits():
    state = RendezvousState("a")
    assert state.put(key()) == []
    assert state.ask(key(), 7) == [AnswerAsker(7, key())]
    assert state.ask(key(edge="value 4"), 8) == []
    assert state.put(key(edge="value 4")) == [AnswerAsker(8, key(edge="value 4"))]
    assert state.num_pending == 0


def test_a_step_that_ends_leaves_nothing_and_refuses_what_comes_later():
    state = RendezvousState("a")
    state.put(key())
    state.ask(key(edge="value 4"), 8)
    state.ask(key(step=2), 9)
    reason = "value 4 does not come: step 1 has ended on /task:0: it failed"
    assert state.end("graph", 1, "it failed") == [DropValue(key()), FailAsker(8, reason)]
    assert state.num_pending == 1
    assert state.put(key(edge="value 5")) == [DropValue(key(edge="value 5"))]
    assert state.ask(key(), 10) == [FailAsker(10, "step 1 has ended on /task:0: it failed")]


def test_a_key_of_another_incarnation_fails_immediately():
    (failure,) = RendezvousState("b").ask(key(), 1)
    assert failure.reason == (
        "/task:0 has restarted: value 3 of step 1 was requested from its process a, but b runs there now"
    )


def test_a_value_that_is_put_twice_is_a_bug():
    state = RendezvousState("a")
    state.put(key())
    with pytest.raises(InternalError, match="put into the rendezvous twice"):
        state.put(key())


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "ask", "end"]), st.integers(1, 3), st.integers(0, 2)),
        max_size=25,
    )
)
def test_each_asker_gets_one_answer_and_no_value_is_used_twice(events):
    state = RendezvousState("a")
    open_asks: dict[int, RendezvousKey] = {}
    kept: set[RendezvousKey] = set()
    for ticket, (event, step, edge) in enumerate(events):
        name = key(step, f"value {edge}")
        if event == "put":
            if name in kept:
                continue
            kept.add(name)
            instructions = state.put(name)
        elif event == "ask":
            open_asks[ticket] = name
            instructions = state.ask(name, ticket)
        else:
            instructions = state.end("graph", step, "over")
        for instruction in instructions:
            match instruction:
                case AnswerAsker(asker, answered):
                    assert open_asks.pop(asker) == answered
                    kept.remove(answered)
                case FailAsker(asker, _):
                    open_asks.pop(asker)
                case DropValue(dropped):
                    kept.remove(dropped)
        assert state.num_pending == len(kept) + len(open_asks)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(6, 8)[::2, 1::3],
        torch.randn(4, 1).expand(4, 5),
        torch.randn(2, 1, 3).expand(2, 4, 3).transpose(0, 2),
        torch.arange(3),
        torch.randn(3).bfloat16(),
        torch.tensor(True),
        torch.empty(0, 3),
    ],
    ids=lambda x: f"{list(x.shape)}-{list(x.stride())}-{x.dtype}",
)
def test_a_tensor_arrives_with_its_elements_dtype_and_strides(x):
    y = arrived(sent(x), torch.device("cpu"))
    assert torch.equal(x, y)
    assert (x.dtype, x.stride()) == (y.dtype, y.stride())
