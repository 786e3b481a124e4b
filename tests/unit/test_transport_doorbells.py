"""Doorbells that ring while their rank closes."""

from __future__ import annotations

from types import SimpleNamespace

from braid.runtime.transport.wait import Doorbells


def test_an_operation_that_ends_after_the_close_wakes_nobody():
    words = memoryview(bytearray(512)).cast("Q")
    bells = Doorbells(SimpleNamespace(words=words))
    bells.close()
    words.release()
    bells.ring_own()
