"""Futures that are waited for together end at the first error, and keep its type."""

from __future__ import annotations

import pytest

from braid.compat.torch_rpc import futures
from braid.rpc.outcomes import AnswerFuture


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
    assert (never.done(), collected.done()) == (False, True)
    for wait in (collected.wait, lambda: futures.wait_all([never, fails])):
        with pytest.raises(LookupError, match="first"):
            wait()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_errors_that_are_no_exceptions_end_the_wait(error):
    fails = AnswerFuture()
    collected = futures.collect_all([futures.Future(), fails])
    fails.set_exception(error)
    assert collected.done()
    with pytest.raises(type(error)):
        collected.wait()


def test_no_future_is_waited_for():
    assert futures.wait_all([]) == []
    assert futures.collect_all([]).wait() == []
