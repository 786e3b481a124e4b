"""The store's state machine: who is answered, with what, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from braid.runtime.store.store_state import (
    Add,
    AddressedReply,
    Append,
    Check,
    CompareSet,
    Delete,
    Get,
    Missing,
    MultiGet,
    MultiSet,
    NumKeys,
    Refusal,
    Set,
    StoreAnswer,
    StoreState,
    StoreTable,
    StoreWait,
)


def ask(state, client, number, request, now_ns=0, timeout_ns=100):
    return state.request(client, number, request, now_ns=now_ns, timeout_ns=timeout_ns)


def test_each_request_does_what_the_table_above_the_code_says():
    table = StoreTable()
    requests = [
        Set("a", b"1"),
        Get("a"),
        Add("a", 2),
        Append("a", b"0"),
        Add("a", -40),
        CompareSet("a", b"0", b"x"),
        CompareSet("a", b"-10", b"x"),
        CompareSet("b", b"?", b"y"),
        CompareSet("b", b"", b"y"),
        MultiSet({"c": b"3", "d": b""}),
        MultiGet(["d", "c"]),
        StoreWait(["a", "b"]),
        Check(["a", "d"]),
        Delete("d"),
        Delete("d"),
        Check(["a", "d"]),
        NumKeys(),
    ]
    replies = [table.apply(request) for request in requests]
    values = [None, b"1", 3, None, -10, b"-10", b"x", b"?", b"y", None]
    values += [[b"", b"3"], None, True, True, False, False, 3]
    assert replies == [StoreAnswer(value) for value in values]
    assert table.values == {"a": b"x", "b": b"y", "c": b"3"}


def test_missing_keys_are_named_once_and_in_order():
    table = StoreTable()
    table.apply(Set("b", b""))
    assert table.apply(MultiGet(["c", "b", "a", "c"])) == Missing(["c", "a"])


def test_adding_to_a_text_or_beyond_64_bits_changes_nothing():
    table = StoreTable()
    table.apply(MultiSet({"t": b"1_0", "n": str(2**63 - 1).encode()}))
    replies = [table.apply(Add("t", 1)), table.apply(Add("n", 1))]
    assert [type(reply) for reply in replies] == [Refusal, Refusal]
    assert table.values == {"t": b"1_0", "n": b"9223372036854775807"}


def test_a_get_is_answered_when_the_key_is_set():
    state = StoreState()
    assert ask(state, 1, 10, Get("k")) == []
    assert ask(state, 2, 20, Set("k", b"v")) == [
        AddressedReply(2, 20, StoreAnswer(None)),
        AddressedReply(1, 10, StoreAnswer(b"v")),
    ]
    assert (state.num_waiting, state.next_deadline_ns()) == (0, None)


def test_those_who_wait_are_answered_in_the_order_they_came():
    state = StoreState()
    for client in (3, 1, 2):
        ask(state, client, 0, Get("k"))
    answered = [delivery.client for delivery in ask(state, 9, 0, Add("k", 1))]
    assert answered == [9, 3, 1, 2]


def test_a_wait_needs_all_keys_at_the_same_time():
    state = StoreState()
    ask(state, 1, 0, StoreWait(["a", "b"]))
    assert len(ask(state, 2, 1, Set("a", b""))) == 1
    ask(state, 2, 2, Delete("a"))
    assert len(ask(state, 2, 3, Set("b", b""))) == 1
    assert ask(state, 2, 4, Append("a", b"!"))[1:] == [AddressedReply(1, 0, StoreAnswer(None))]


def test_a_failed_compare_set_wakes_nobody():
    state = StoreState()
    ask(state, 1, 0, Get("k"))
    assert ask(state, 2, 0, CompareSet("k", b"x", b"y")) == [
        AddressedReply(2, 0, StoreAnswer(b"x"))
    ]
    assert state.num_waiting == 1


def test_the_deadline_answers_with_what_is_still_missing():
    state = StoreState()
    ask(state, 1, 0, StoreWait(["a", "b"]), now_ns=5, timeout_ns=100)
    ask(state, 2, 0, Get("c"), now_ns=5, timeout_ns=50)
    ask(state, 3, 0, Set("a", b""))
    assert (state.next_deadline_ns(), state.expire(54)) == (55, [])
    assert state.expire(104) == [AddressedReply(2, 0, Missing(["c"]))]
    assert state.expire(105) == [AddressedReply(1, 0, Missing(["b"]))]
    assert (state.num_waiting, state.next_deadline_ns()) == (0, None)


def test_without_patience_the_answer_comes_at_once():
    state = StoreState()
    assert ask(state, 1, 0, Get("k"), timeout_ns=0) == [AddressedReply(1, 0, Missing(["k"]))]


def test_a_client_that_has_gone_is_not_answered():
    state = StoreState()
    ask(state, 1, 0, Get("k"))
    ask(state, 1, 1, StoreWait(["k", "l"]))
    ask(state, 2, 0, Get("k"))
    state.forget(1)
    assert [each.client for each in ask(state, 3, 0, Set("k", b""))] == [3, 2]
    assert state.expire(10**9) == []


def test_a_number_that_still_waits_is_refused():
    state = StoreState()
    ask(state, 1, 7, Get("k"))
    [delivery] = ask(state, 1, 7, Get("l"))
    assert isinstance(delivery.reply, Refusal)


keys = st.sampled_from("abc")
requests = st.one_of(
    st.builds(Set, keys, st.binary(max_size=2)),
    st.builds(Get, keys),
    st.builds(Delete, keys),
    st.builds(StoreWait, st.lists(keys, max_size=3)),
    st.builds(MultiGet, st.lists(keys, max_size=3)),
    st.builds(CompareSet, keys, st.sampled_from([b"", b"1"]), st.just(b"1")),
    st.builds(MultiSet, st.dictionaries(keys, st.just(b"1"), max_size=3)),
)


@given(st.lists(st.tuples(st.integers(0, 2), requests, st.integers(0, 5)), max_size=40))
def test_every_request_is_answered_exactly_once(script):
    state, answered = StoreState(), []
    for number, (client, request, timeout_ns) in enumerate(script):
        deliveries = ask(state, client, number, request, now_ns=number, timeout_ns=timeout_ns)
        answered += [(each.client, each.number) for each in deliveries + state.expire(number)]
    answered += [(each.client, each.number) for each in state.expire(10**9)]
    assert sorted(answered) == sorted((client, n) for n, (client, _, _) in enumerate(script))
    assert (state.num_waiting, state._by_key, state.next_deadline_ns()) == (0, {}, None)
