"""The claims of `braid.runtime.store.Store` as one suite, which every store must keep.

Each claim is a function of a list of clients of one empty store; `check_store` runs them all, each
on a new store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

from braid.errors import CommTimeout, ConfigError
from braid.runtime.store import Store

__all__ = ["STORE_CLAIMS", "check_store"]

Claim = Callable[[Sequence[Store]], None]

_SOON_S = 0.02  # for time-outs that are meant to pass
_LATE_S = 30.0  # for time-outs that are not
_NUM_CLIENTS = 3
_NUM_ADDS = 20


def check_store(
    make_clients: Callable[[int], Sequence[Store]], *, refuses_bad_add: bool = True
) -> None:
    """Check that a kind of store keeps its claims; AssertionError names the broken one.

    Args:
        make_clients: Returns n clients of one new, empty store, each for a thread of its own; they
            may be the same object.
        refuses_bad_add: Whether the store refuses an addition to a text (torch's TCPStore ends the
            connection).
    """
    for claim in STORE_CLAIMS:
        if claim is bad_addition_is_refused and not refuses_bad_add:
            continue
        try:
            claim(make_clients(_NUM_CLIENTS))
        except Exception as exc:
            msg = f"the store breaks the claim {claim.__name__!r}: {type(exc).__name__}: {exc}"
            raise AssertionError(msg) from exc


def values_survive_unchanged(clients: Sequence[Store]) -> None:
    """Any bytes come back, to every client; the last `set` wins."""
    values = {"empty": b"", "zero": b"\0", "text": "schön".encode(), "all": bytes(range(256)) * 8}
    for key, value in values.items():
        clients[0].set(key, b"older")
        clients[0].set(key, value)
    read = {key: clients[1].get(key) for key in values}
    _expect(read, values)


def large_values_survive(clients: Sequence[Store]) -> None:
    """A value may exceed a frame's description and a socket's buffer."""
    value = bytes(range(256)) * 4096
    clients[0].set("large", value)
    _expect(clients[1].get("large") == value, True)


def keys_are_any_text(clients: Sequence[Store]) -> None:
    """Keys with slashes, spaces, line ends and other letters are different keys."""
    keys = ["a/b", "a b", "a\nb", "ä", "A"]
    clients[0].multi_set({key: key.encode() for key in keys})
    _expect(clients[1].multi_get(keys), [key.encode() for key in keys])


def get_waits_for_the_key(clients: Sequence[Store]) -> None:
    """A `get` returns once another client has set the key."""
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(clients[0].get, "late", _LATE_S)
        clients[1].set("late", b"here")
        _expect(value.result(_LATE_S), b"here")


def wait_returns_after_the_last_key(clients: Sequence[Store]) -> None:
    """A `wait` for several keys needs all of them, in any order."""
    with ThreadPoolExecutor(2) as pool:
        waited = pool.submit(clients[0].wait, ["a", "b", "c"], _LATE_S)
        values = pool.submit(clients[1].multi_get, ["c", "a"], _LATE_S)
        for key in ("c", "b", "a"):
            clients[2].set(key, key.encode())
        _expect((waited.result(_LATE_S), values.result(_LATE_S)), (None, [b"c", b"a"]))


def every_waiter_is_answered(clients: Sequence[Store]) -> None:
    """One `set` answers all clients that wait for the key."""
    with ThreadPoolExecutor(len(clients)) as pool:
        waiting = [pool.submit(client.get, "go", _LATE_S) for client in clients[1:]]
        clients[0].set("go", b"!")
        _expect([each.result(_LATE_S) for each in waiting], [b"!"] * len(waiting))


def time_out_names_the_missing_keys(clients: Sequence[Store]) -> None:
    """CommTimeout names the missing keys, and only those."""
    clients[0].set("there", b"")
    operations: list[Callable[[], object]] = [
        partial(clients[0].get, "absent", _SOON_S),
        partial(clients[0].wait, ["there", "absent"], _SOON_S),
        partial(clients[0].multi_get, ["there", "absent"], _SOON_S),
    ]
    for operation in operations:
        try:
            operation()
        except CommTimeout as exc:
            _expect(("'absent'" in str(exc).replace("/", "'"), "there'" in str(exc)), (True, False))
        else:
            _expect("no error", "CommTimeout")
    clients[0].set("absent", b"usable after a time-out")
    _expect(clients[0].get("absent", _LATE_S), b"usable after a time-out")


def additions_are_atomic(clients: Sequence[Store]) -> None:
    """Concurrent additions get different sums; the number is stored as text."""
    start = threading.Barrier(len(clients))

    def count(client: Store) -> list[int]:
        start.wait(_LATE_S)
        return [client.add("n", 1) for _ in range(_NUM_ADDS)]

    with ThreadPoolExecutor(len(clients)) as pool:
        sums = sorted(chain.from_iterable(pool.map(count, clients)))
    total = len(clients) * _NUM_ADDS
    _expect(sums, list(range(1, total + 1)))
    _expect((clients[0].get("n"), clients[0].add("n", -total - 5)), (str(total).encode(), -5))
    clients[0].set("n", b"40")
    _expect((clients[1].add("n", 0), clients[1].add("n", 2)), (40, 42))


def bad_addition_is_refused(clients: Sequence[Store]) -> None:
    """An addition to a text changes nothing, and the client remains usable."""
    clients[0].set("text", b"abc")
    try:
        clients[0].add("text", 1)
    except ConfigError:
        _expect(clients[0].get("text"), b"abc")
    else:
        _expect("no error", "ConfigError")


def compare_set_changes_only_what_is_expected(clients: Sequence[Store]) -> None:
    """An empty `expected` creates a missing key; another one leaves it missing."""
    first, second = clients[0], clients[1]
    results = [
        first.compare_set("k", b"x", b"a"),
        first.check(["k"]),
        first.compare_set("k", b"", b"a"),
        second.compare_set("k", b"x", b"b"),
        second.compare_set("k", b"", b"b"),
        second.compare_set("k", b"a", b"c"),
        first.get("k"),
    ]
    _expect(results, [b"x", False, b"a", b"a", b"a", b"c", b"c"])


def one_compare_set_wins(clients: Sequence[Store]) -> None:
    """Clients that compete for a key agree on the winner."""
    start = threading.Barrier(len(clients))

    def claim(index: int) -> bytes:
        start.wait(_LATE_S)
        return clients[index].compare_set("leader", b"", str(index).encode())

    with ThreadPoolExecutor(len(clients)) as pool:
        winners = set(pool.map(claim, range(len(clients))))
    _expect(winners, {clients[0].get("leader")})


def check_needs_all_keys(clients: Sequence[Store]) -> None:
    """`check` does not wait, and is true only when all keys are there."""
    clients[0].set("a", b"")
    checked = [clients[1].check(keys) for keys in (["a"], ["a", "b"], ["b"])]
    _expect(checked, [True, False, False])


def deleted_keys_are_gone(clients: Sequence[Store]) -> None:
    """`delete_key` returns whether there was a key, which can be set again."""
    before = clients[0].num_keys()
    clients[0].set("a", b"1")
    results = [
        clients[1].num_keys() - before,
        clients[1].delete_key("a"),
        clients[0].delete_key("a"),
        clients[0].check(["a"]),
        clients[0].num_keys() - before,
    ]
    _expect(results, [1, True, False, False, 0])
    clients[0].set("a", b"2")
    _expect(clients[1].get("a"), b"2")


def several_keys_at_once(clients: Sequence[Store]) -> None:
    """`multi_set` and `multi_get` agree with `set` and `get`; a key may be asked twice."""
    clients[0].multi_set({"a": b"1", "b": b""})
    clients[0].set("c", b"3")
    _expect(clients[1].multi_get(["c", "a", "b", "a"]), [b"3", b"1", b"", b"1"])
    _expect(clients[1].multi_get([]), [])


def append_extends_the_value(clients: Sequence[Store]) -> None:
    """`append` creates the key, wakes its waiters, and extends it for all clients."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].wait, ["log"], _LATE_S)
        clients[1].append("log", b"one,")
        _expect(waiting.result(_LATE_S), None)
    clients[2].append("log", b"two")
    _expect(clients[0].get("log"), b"one,two")


STORE_CLAIMS: tuple[Claim, ...] = (
    values_survive_unchanged,
    large_values_survive,
    keys_are_any_text,
    get_waits_for_the_key,
    wait_returns_after_the_last_key,
    every_waiter_is_answered,
    time_out_names_the_missing_keys,
    additions_are_atomic,
    bad_addition_is_refused,
    compare_set_changes_only_what_is_expected,
    one_compare_set_wins,
    check_needs_all_keys,
    deleted_keys_are_gone,
    several_keys_at_once,
    append_extends_the_value,
)


def _expect(actual: object, expected: object) -> None:
    if actual != expected:
        msg = f"expected {expected!r}, got {actual!r}"
        raise AssertionError(msg)
