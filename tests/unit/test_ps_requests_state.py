"""A request is asked again until all of its parts are answered, whatever routes say meanwhile."""

from __future__ import annotations

from braid.ps.protocol.requests_state import Done, PendingRequest, RequestsState, SendParts


def test_a_part_that_has_moved_is_asked_for_again_where_the_next_route_says():
    requests, one = RequestsState(), PendingRequest([0], lambda _: "server:0", None)
    assert requests.begin(one) == [SendParts(one, "server:0", (0,))]
    assert requests.moved(one, "server:0", [0]) == []
    # the part has come back meanwhile, and the route in between was missed
    assert requests.rerouted() == [SendParts(one, "server:0", (0,))]
    assert requests.rerouted() == []
    assert requests.answered(one, [0]) == [Done(one)]


def test_a_part_whose_node_was_lost_is_asked_for_elsewhere_or_when_the_node_is_back():
    where = {0: "server:0", 1: "server:1"}
    requests, two = RequestsState(), PendingRequest([0, 1], where.get, None)
    requests.begin(two)
    requests.lost("server:0")
    assert requests.linked("server:0") == [SendParts(two, "server:0", (0,))]
    requests.lost("server:0")
    where[0] = "server:1"
    assert requests.rerouted() == [SendParts(two, "server:1", (0,))]
