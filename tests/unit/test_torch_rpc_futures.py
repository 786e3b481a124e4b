"""Futures that are waited for together end at the first error, and keep its type."""

from __future__ import annotations

import pytest

from braid.compat.torch_rpc import futures


def test_the_values_come_in_the_order_of_the_futures():
    calls = [futures.Future() for _ in range(3)]
    collected = futures.collect_all(calls)
    for value in (2, 0, 1):
        assert not collected.done()
        calls[value].set_result(value)
    assert collected.wait() == calls
    assert futures.wait_all(iter(calls)) == [0, 1, 2]


def test_the_first_error_ends_the_wait_with_its_type():
    never, fails, fails_later = (futures.Future() for _ in range(3))
    collected = futures.collect_all([never, fails_later, fails])
    fails.set_exception(LookupError("first"))
    fails_later.set_exception(ValueError("second"))
    assert not never.done()
    for wait in (collected.wait, lambda: futures.wait_all([never, fails])):
        with pytest.raises(LookupError, match="first"):
            wait()


def test_no_future_is_waited_for():
    assert futures.wait_all([]) == []
    assert futures.collect_all([]).wait() == []
