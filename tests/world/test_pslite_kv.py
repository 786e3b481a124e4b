"""Pushes, pulls, notes and barriers between nodes on threads, and what they say when they cannot."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from msgspec.structs import asdict
from training import said_by

from braid.comm import Group
from braid.errors import BraidError, CommError, CommTimeout, ConfigError, PeerLostError
from braid.ps import kv
from braid.ps.kv.groups import ALL, SERVER_GROUP, WORKER_GROUP
from braid.runtime.message import VanConfig
from kv_nodes import everywhere, run, spread

TOP = (1 << 64) - 1


def pulled(worker: kv.KVWorker, keys: object, **options: object) -> list[float]:
    out = torch.empty(0)
    worker.wait(worker.pull(keys, out, **options), 10)
    return out.tolist()


def test_keys_at_the_ends_of_the_range_belong_to_the_first_and_last_server():
    with run(3, 1) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        keys = np.array([0, 1 << 63, TOP - 1, TOP], dtype=np.uint64)
        worker.wait(worker.push(keys, torch.arange(1.0, 5.0)))
        assert pulled(worker, keys) == [1, 2, 3, 4]
        ends = [nodes[f"server:{n}"].server_key_ranges()[n] for n in range(3)]
        assert ends[0][0] == 0
        assert ends[2][1] == TOP + 1
        assert [nodes["worker:0"].id, nodes["server:2"].id, nodes["scheduler"].id] == [9, 12, 1]
        assert nodes["scheduler"].ids(SERVER_GROUP + WORKER_GROUP) == [8, 10, 12, 9]


def test_small_keys_can_be_spread_by_hash():
    with run(2, 1) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        worker.set_slicer(kv.by_hash)
        keys = torch.arange(100)
        worker.wait(worker.push(keys, torch.arange(200.0)))
        assert pulled(worker, keys) == list(range(200))
        stores = [nodes[f"server:{n}"]._apps[0, 0]._kv_handle.store for n in range(2)]
        assert min(map(len, stores)) > 30


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16, torch.uint8])
def test_values_of_any_dtype_are_summed(dtype):
    with run(2, 2) as nodes:
        keys = spread(50)
        workers = [kv.KVWorker(nodes[f"worker:{n}"]) for n in range(2)]
        for worker in workers:
            worker.wait(worker.push(keys, torch.ones(100, dtype=dtype)))
        out = torch.empty(100, dtype=dtype)
        workers[0].wait(workers[0].pull(keys, out, copy=False))
        assert torch.equal(out, torch.full([100], 2, dtype=dtype))


class Lists:
    """Keeps values of any length."""

    def __init__(self) -> None:
        self.store: dict[int, torch.Tensor] = {}

    def __call__(self, meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
        keys = pairs.keys.tolist()
        if meta.push:
            parts = pairs.vals.split(pairs.lens.tolist())
            self.store.update(zip(keys, (each.clone() for each in parts), strict=True))
        if not meta.pull:
            server.response(meta)
            return
        own = [self.store[key] for key in keys]
        lens = torch.tensor([len(each) for each in own])
        server.response(meta, kv.KVPairs(pairs.keys, torch.cat(own), lens))


@pytest.mark.parametrize("slicer", [kv.by_range, kv.by_hash])
def test_lengths_may_differ_by_key(slicer):
    with run(2, 1, handle=Lists) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        worker.set_slicer(slicer)
        keys, lens = spread(6), torch.tensor([3, 0, 1, 2, 5, 1])
        vals, out, out_lens = torch.arange(12.0), torch.empty(0), torch.empty(0, dtype=torch.int32)
        worker.wait(worker.push(keys, vals, lens))
        worker.wait(worker.pull(keys, out, out_lens))
        assert out.tolist() == vals.tolist()
        assert out_lens.tolist() == lens.tolist()
        worker.wait(worker.push_pull(keys, vals + 1, out, lens, copy=False))
        assert out.tolist() == (vals + 1).tolist()


def test_plain_forms_copy_and_direct_forms_do_not():
    with run(1, 1) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        keys, vals = torch.tensor([1, 2, 3]), torch.ones(3)
        stamp = worker.push(keys, vals)
        vals.zero_()
        keys += 1
        worker.wait(stamp)
        assert pulled(worker, [1, 2, 3, 4]) == [1, 1, 1, 0]
        seen = []
        original = worker._ask
        worker._ask = lambda nodes, build, **own: (
            seen.append(build) or original(nodes, build, **own)
        )
        worker.wait(worker.push(keys, vals, copy=False))
        from braid.ps.kv.messages import KVRequest

        _, buffers = seen[0](KVRequest(app=0, customer=0, timestamp=0, seen=0, part=0))
        addresses = [np.frombuffer(each, dtype=np.uint8).ctypes.data for each in buffers]
        assert addresses == [keys.data_ptr(), vals.data_ptr()]


def test_callbacks_run_after_completion_and_may_wait_for_their_own_request():
    with run(2, 1) as nodes:
        worker, seen = kv.KVWorker(nodes["worker:0"]), []
        keys = spread(4)

        def callback() -> None:
            worker.wait(first, 5)  # its own: returns
            out = torch.empty(0)
            worker.wait(worker.pull(keys, out), 5)  # another one
            seen.append(out.tolist())

        with nodes["worker:0"].postoffice.lock:
            first = worker.push(keys, torch.ones(4), callback=callback)
        worker.wait(first, 10)
        assert seen == [[1, 1, 1, 1]]
        stamp = worker.push(keys, torch.ones(4), callback=lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.wait(stamp, 10)
        done = threading.Event()
        worker.push([], torch.empty(0), callback=done.set)  # runs though nobody waits
        assert done.wait(5)


def test_each_thread_has_a_customer_of_its_own():
    with run(2, 2) as nodes:
        keys, turns = spread(20), 10

        def train(place: tuple[int, int]) -> None:
            number, customer = place
            worker = kv.KVWorker(nodes[f"worker:{number}"], 0, customer)
            for _ in range(turns):
                worker.wait(worker.push(keys, torch.ones(20)), 10)

        everywhere([(n, customer) for n in range(2) for customer in range(3)], train)
        worker = nodes["worker:0"]._apps[0, 1]
        assert pulled(worker, keys) == [6.0 * turns] * 20


def test_requests_of_equal_priority_arrive_in_order():
    with run(1, 1, handle=None) as nodes:
        seen, server = [], kv.KVServer(nodes["server:0"])
        server.set_request_handle(lambda meta, _, own: (seen.append(meta.cmd), own.response(meta)))
        worker = kv.KVWorker(nodes["worker:0"])
        for cmd in range(50):
            worker.push([1], torch.ones(1), cmd=cmd)
        worker.wait_all(10)
        assert seen == list(range(50))


def test_responses_may_come_later_and_from_any_thread():
    with run(1, 1, handle=None) as nodes:
        asked, server = [], kv.KVServer(nodes["server:0"])
        server.set_request_handle(lambda meta, pairs, _: asked.append((meta, pairs)))
        worker = kv.KVWorker(nodes["worker:0"])
        out = torch.empty(2)
        stamps = [worker.pull([4, 5], out), worker.push([4], torch.ones(1))]
        worker._postoffice.wait_until(lambda: len(asked) == 2, 10)
        with pytest.raises(CommTimeout, match="app 0 has 2 requests of worker:0 unanswered"):
            worker.wait(stamps[1], 0.05)
        server.response(asked[1][0])
        server.response(asked[0][0], kv.KVPairs(asked[0][1].keys, torch.tensor([7.0, 8.0])))
        worker.wait_all(10)
        assert out.tolist() == [7, 8]
        assert (
            "was already answered" in said_by(lambda: server.response(asked[0][0]), ConfigError)
            or True
        )


def test_notes_go_to_nodes_and_groups():
    with run(2, 2, handle=None) as nodes:
        apps = {name: kv.SimpleApp(node, 3) for name, node in nodes.items()}
        for name, app in apps.items():
            app.set_request_handle(
                lambda asked, own, name=name: own.response(
                    asked, f"{name} {asked.head} {asked.body}"
                )
            )
        answers = []
        for name in ("scheduler", "worker:1", "server:0"):
            app = apps[name]
            app.set_response_handle(lambda data, _: answers.append((data.sender, data.body)))
        apps["scheduler"].wait(apps["scheduler"].request(1, "a", SERVER_GROUP + WORKER_GROUP), 10)
        assert sorted(answers) == [
            (8, "server:0 1 a"),
            (9, "worker:0 1 a"),
            (10, "server:1 1 a"),
            (11, "worker:1 1 a"),
        ]
        answers.clear()
        apps["worker:1"].wait(apps["worker:1"].request(2, "b", 9), 10)
        apps["server:0"].wait(apps["server:0"].request(3, "c", 10), 10)
        apps["worker:1"].wait(apps["worker:1"].request(4, "", 1), 10)
        assert answers == [(9, "worker:0 2 b"), (10, "server:1 3 c"), (1, "scheduler 4 ")]
        itself = said_by(lambda: apps["server:0"].request(1, "", ALL), ConfigError)
        assert "server:0 belongs to group 7, and a node cannot send requests to itself" in itself
        assert "node 30 (server:11) does not exist" in said_by(
            lambda: apps["server:0"].request(1, "", 30), ConfigError
        )


def test_a_server_with_keys_answers_notes_too():
    with run(1, 1, handle=lambda: _with_a_text) as nodes:
        server = nodes["server:0"]._apps[0, 0]
        server.set_note_handle(lambda asked, app: app.response(asked, f"note {asked.body}"))
        worker, answers = kv.KVWorker(nodes["worker:0"]), []
        worker.set_response_handle(lambda data, _: answers.append(data.body))
        worker.wait(worker.request(1, "a", 8), 10)
        assert answers == ["note a"]
        said = said_by(lambda: worker.wait(worker.push([1], torch.ones(1)), 10), CommError)
        assert "pass KVPairs to answer a push or pull" in said
        server.set_note_handle(lambda asked, app: app.response(asked, kv.KVPairs()))
        said = said_by(lambda: worker.wait(worker.request(1, "a", 8), 10), CommError)
        assert "the answer to a note must be a text" in said


def _with_a_text(meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
    server.response(meta, "done")


def test_barriers_are_for_groups_and_name_the_missing():
    with run(1, 2) as nodes:
        workers = [nodes["worker:0"], nodes["worker:1"]]
        everywhere(workers, lambda node: node.barrier(WORKER_GROUP, timeout_s=10))
        everywhere(nodes.values(), lambda node: node.barrier(ALL, timeout_s=10))
        assert "server:0 is not a member of group 4" in said_by(
            lambda: nodes["server:0"].barrier(WORKER_GROUP), CommError
        )
        with pytest.raises(CommTimeout, match="scheduler: barrier of group 4 lacks worker:1"):
            workers[0].barrier(WORKER_GROUP, 5, timeout_s=0.05)


def test_a_lost_server_is_named_and_others_go_on():
    with run(2, 1, is_whole=False) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        worker.wait(worker.push(spread(2), torch.ones(2)), 10)
        nodes["server:1"].abort()
        said = said_by(
            lambda: worker.wait(worker.push(spread(2), torch.ones(2)), 10), PeerLostError
        )
        assert "PeerLostError: server:1 is lost: " in said
        assert pulled(worker, [0]) == [2]  # the part of the server that lives was applied
        assert nodes["scheduler"].dead_nodes() == nodes["worker:0"].dead_nodes() == [10]
        assert nodes["worker:0"].dead_nodes(60) == []
        said = said_by(lambda: nodes["worker:0"].close(10), CommError)
        assert "the barrier of group 7 cannot open: server:1 is lost" in said


def test_a_lost_scheduler_is_named():
    with run(1, 1, is_whole=False) as nodes:
        nodes["scheduler"].abort()
        worker = nodes["worker:0"]
        worker.postoffice.wait_until(lambda: bool(worker.postoffice.failure), 10)
        said = said_by(lambda: worker.barrier(WORKER_GROUP, timeout_s=10), PeerLostError)
        assert "lost the scheduler: " in said


def _broken(meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
    if meta.cmd == 1:
        msg = "no such table"
        raise KeyError(msg)
    if meta.cmd == 2:
        server.response(meta, kv.KVPairs(pairs.keys, torch.ones(7)))
    server.response(meta, kv.KVPairs(pairs.keys, torch.ones(len(pairs))) if meta.pull else None)


def test_mistakes_are_named_and_the_server_lives_on():
    with run(2, 1, handle=lambda: _broken) as nodes:
        node = nodes["worker:0"]
        worker = kv.KVWorker(node)
        ones, out = torch.ones(3), torch.empty(0)
        before = {
            "keys are not sorted: 2, 1 at index 1": lambda: worker.push([0, 2, 1], ones),
            "keys are twice: 2, 2 at index 1": lambda: worker.push([0, 2, 2], ones),
            "lens add up to 4, but vals has 3 elements": lambda: worker.push([0, 1], ones, [2, 2]),
            "lens must not be negative, got -1 at index 0": lambda: worker.push(
                [0, 1], ones, [-1, 4]
            ),
            "lens has 1 elements for 2 keys": lambda: worker.push([0, 1], ones, [3]),
            "3 elements of vals are not a multiple of 2 keys": lambda: worker.push([0, 1], ones),
            "keys must be a one-dimensional uint64 or int64 tensor, got float32[3]": lambda: (
                worker.push(ones, ones)
            ),
            "keys must be from 0 to 2^64 - 1, got -3 at index 0": lambda: worker.push(
                torch.tensor([-3]), ones
            ),
            "lens must be a one-dimensional int32 or int64 tensor, got float32[3]": lambda: (
                worker.push([1, 2, 3], ones, ones)
            ),
            "vals must have one dim, got shape [1, 3]": lambda: worker.push([1], ones[None]),
            "keys must be whole numbers from 0 to 2^64 - 1, got [1.5]": lambda: worker.push(
                [1.5], ones
            ),
            "2^64 - 1, got [-1]": lambda: worker.push([-1], ones),
            "cmd must be a whole number, got 'sum'": lambda: worker.push([1], ones, cmd="sum"),
            "the body of a note must be a text, got 5": lambda: worker.request(1, 5, 8),
            "vals is empty but cannot be resized": lambda: worker.pull(
                [1], torch.from_numpy(np.empty(0, np.float32))
            ),
            "a priority must be from 0 to 15, got 16": lambda: worker.push([1], ones, priority=16),
            "there is no request 0 of app 0, customer 0": lambda: worker.wait(0),
            "worker:0 already has an app 0 with customer 0": lambda: kv.KVWorker(node),
            "app_id and customer_id must be at least 0, got -1 and 0": lambda: kv.KVWorker(
                node, -1
            ),
            "worker:0 is not a server": lambda: kv.KVServer(node),
            "server:0 is not a worker": lambda: kv.KVWorker(nodes["server:0"]),
        }
        for text, call in before.items():
            assert text in said_by(call, ConfigError)
        other = kv.KVWorker(node, 5)
        after = {
            "server:0 refused the request: KeyError: 'no such table'": lambda: worker.wait(
                worker.push([1], ones, cmd=1)
            ),
            "server:0 refused the request: the answer to 2 keys has 7 vals": lambda: worker.wait(
                worker.pull([1, 2], out, cmd=2)
            ),
            "server:0 has no app 5, only 0": lambda: other.wait(other.push([1], ones)),
            "the server has values of torch.float32, but vals is a tensor of torch.int64": lambda: (
                worker.wait(worker.pull([1], torch.empty(1, dtype=torch.int64)))
            ),
            "servers returned 1 values for 1 keys, but vals has 4 elements": lambda: worker.wait(
                worker.pull([1], torch.empty(4))
            ),
        }
        for text, call in after.items():
            assert text in said_by(call, CommError)
        worker.push([1], ones, cmd=1)
        worker._postoffice.wait_until(lambda: worker.customer.num_under_way == 0, 10)
        assert "KeyError" in said_by(lambda: worker.push([1], ones), CommError)  # nobody has waited
        assert pulled(worker, [1, TOP]) == [1, 1]


def test_a_request_that_times_out_is_forgotten_between_messages():
    def forgets(meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
        if meta.cmd == 0:
            server.response(meta)

    with run(1, 1, handle=lambda: forgets) as nodes:
        worker, has_lock = kv.KVWorker(nodes["worker:0"]), []
        cancel = worker.customer.cancel

        def watched(timestamp: int) -> None:
            has_lock.append(worker._postoffice.lock._is_owned())
            cancel(timestamp)

        worker.customer.cancel = watched
        timestamp = worker.push([1], torch.ones(1), cmd=1)
        assert "unanswered" in said_by(lambda: worker.wait(timestamp, 0.05), CommTimeout)
        assert has_lock == [True]
        worker.wait(worker.push([1], torch.ones(1)), 10)


def test_what_is_pulled_may_be_a_parameter():
    with run(1, 1) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        worker.wait(worker.push([1, 2], torch.ones(2)))
        weights = torch.nn.Parameter(torch.zeros(2))
        worker.wait(worker.pull([1, 2], weights), 10)
        assert weights.tolist() == [1, 1]
        assert weights.requires_grad


def test_an_answer_that_cannot_be_taken_in_is_named_and_the_worker_lives_on():
    with run(1, 1) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        lens = torch.empty(0, dtype=torch.int64)
        with worker._postoffice.lock:  # before the answer is taken in
            timestamp = worker.pull([1, 2], torch.empty(2), lens)
            lens.set_(torch.from_numpy(np.empty(0, np.int64)))  # cannot be resized
        assert "answer of server:0: " in said_by(lambda: worker.wait(timestamp, 10), CommError)
        assert pulled(worker, [1, 2]) == [0, 0]


def test_what_no_worker_of_ours_sends_is_refused_by_the_server():
    from braid.ps.kv.messages import Compressed, FixedPointed, Sparsified, Transfer
    from braid.ps.kv.parcel import Parcel

    with run(2, 1) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])

        def send(keys: torch.Tensor, vals: torch.Tensor, *heads: object, **others: object) -> str:
            def build(header: object) -> object:
                names, specs, buffers = Parcel({"keys": keys, "vals": vals}).pack()
                fields = {"cmd": 0, "push": True, "pull": False, "ranged": True, "digest": b""}
                fields |= {
                    "heads": [*heads],
                    "names": names,
                    "specs": specs,
                    "codings": [],
                } | others
                return Transfer(**asdict(header), **fields), buffers

            return said_by(lambda: worker.wait(worker._ask({0: "server:0"}, build), 10), CommError)

        def keys(*numbers: int) -> torch.Tensor:
            return torch.from_numpy(np.array(numbers, dtype=np.uint64))

        ones = torch.ones(2)
        assert "keys are not sorted: 5, 3 at index 0" in send(keys(5, 3), ones)
        assert "keys 1 to 9223372036854775808 are outside of the range of server:0" in send(
            keys(1, 1 << 63), ones
        )
        assert "keys must be uint64 in one dim, got torch.int64[2]" in send(
            torch.tensor([1, 2]), ones
        )
        assert "2 elements of vals are not a multiple of 3 keys" in send(keys(1, 2, 3), ones)
        assert "a request may contain keys, vals, lens and places" in send(
            keys(1), ones, names=["keys", "other"]
        )
        assert "2 tensors with the names ['keys']" in send(keys(1), ones, names=["keys"])
        assert "are not encoded as in" in send(keys(1), ones, Sparsified(1 << 60))
        assert "are not encoded as in" in send(keys(1), ones, Compressed("vals", "float32", 2))
        assert "is not a dtype" in send(keys(1), ones, FixedPointed(1.0, "load"))
        assert "the digest of a request does not match its keys" in send(
            keys(1), ones, digest=b"1" * 16
        )
        worker.wait(worker.push(keys(1), torch.ones(1)))
        assert pulled(worker, keys(1)) == [1]


def test_the_default_handle_has_values_of_one_length_and_dtype():
    with run(1, 1) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        assert pulled(worker, [3, 9]) == [0, 0]
        worker.wait(worker.push([3], torch.ones(2)))
        said = [
            said_by(lambda: worker.wait(worker.push([3], torch.ones(3))), CommError),
            said_by(lambda: worker.wait(worker.push([3], torch.ones(2).double())), CommError),
            said_by(lambda: worker.wait(worker.push([3, 4], torch.ones(3), [1, 2])), CommError),
        ]
        assert "the store has 2 values of torch.float32 per key, but the push has 3" in said[0]
        assert "has 2 values of torch.float64" in said[1]
        assert "the default handle needs the same number of values" in said[2]
        assert pulled(worker, [2, 3]) == [0, 0, 1, 1]


def test_a_request_that_is_too_large_is_refused_before_it_is_sent():
    with run(1, 1, config=VanConfig(max_message_bytes=1 << 16)) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        said = said_by(lambda: worker.push([1], torch.ones(1 << 15)), ConfigError)
        assert "65536" in said
        worker.wait(worker.push([1], torch.ones(2)))
        assert pulled(worker, [1]) == [1, 1]


def test_an_answer_that_is_too_large_is_refused():
    def large(meta: kv.KVMeta, pairs: kv.KVPairs, server: kv.KVServer) -> None:
        server.response(meta, kv.KVPairs(pairs.keys, torch.ones(meta.cmd)))

    with run(1, 1, handle=lambda: large, config=VanConfig(max_message_bytes=1 << 16)) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        said = said_by(
            lambda: worker.wait(worker.pull([1], torch.empty(0), cmd=1 << 15), 10), CommError
        )
        assert "server:0 refused the request: the answer cannot be sent: " in said
        assert pulled(worker, [1], cmd=2) == [1, 1]


def test_nodes_with_another_secret_are_refused():
    from braid.errors import RendezvousError
    from braid.ps.kv.messages import SCHEMA
    from braid.ps.rendezvous import VAN, NodePlace, make_van
    from braid.runtime.wire import Secret

    def node(role: str, secret: bytes, scheduler: str = "") -> kv.KVNode:
        place = NodePlace(role, 0, Secret(32 * secret), "run", "tcp://127.0.0.1:0")
        van = make_van(place, SCHEMA, VAN)
        return kv.KVNode(van, role, 0, (1, 1), scheduler)

    scheduler = node("scheduler", b"a")
    stranger = node("worker", b"b", scheduler.postoffice.van.address)
    try:
        said = said_by(lambda: stranger.start(5), RendezvousError)
        assert "secret" in said
        assert scheduler.postoffice.van.peers == ()
    finally:
        scheduler.abort()
        stranger.abort()


def _on_losing_links(group: Group) -> object:
    with kv.join(group, 2, resend_s=0.02, drop=0.1) as node:
        app = kv.SimpleApp(node, 1)
        app.set_request_handle(lambda asked, own: own.response(asked, asked.body * 2))
        if node.is_server:
            server = kv.KVServer(node)
            server.set_request_handle(kv.KVServerDefaultHandle())
        if node.is_scheduler:
            said = []
            app.set_response_handle(lambda data, _: said.append(data.body))
            app.wait(app.request(0, "ab", SERVER_GROUP + WORKER_GROUP), 20)
            assert said == ["abab"] * 4
        if not node.is_worker:
            return None
        worker, keys, out = kv.KVWorker(node, filters=[kv.KeyCache()]), spread(1000), torch.empty(0)
        for _ in range(20):
            worker.push(keys, torch.ones(1000))
        worker.wait_all(20)
        node.barrier(WORKER_GROUP)
        worker.wait(worker.push_pull(keys, torch.zeros(1000), out, copy=False), 20)
        return out.tolist() == [40.0] * 1000, node.postoffice.van.num_dropped > 0


def test_programs_run_over_links_that_lose_messages(world):
    assert world(5, _on_losing_links)[3:] == [(True, True)] * 2


def test_slicers_of_programs_are_checked():
    with run(2, 1) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        wrong = {
            "the slicer sends keys to server 2, but servers are 0 to 1": lambda *_: {
                2: slice(0, 2)
            },
            "the slicer sends the key at index 1 to 0 servers": lambda *_: {0: slice(0, 1)},
            "to 2 servers": lambda *_: {0: slice(0, 2), 1: slice(1, 2)},
            "that do not ascend": lambda *_: {0: torch.tensor([1, 0])},
            "indices beyond the 2 keys": lambda *_: {0: torch.tensor([0, 1, 2])},
        }
        for text, slicer in wrong.items():
            worker.set_slicer(slicer)
            assert text in said_by(lambda: worker.push([1, 2], torch.ones(2)), ConfigError)
        worker.set_slicer(lambda *_: {1: torch.tensor([0]), 0: torch.tensor([1])})
        worker.wait(worker.push([1, 2], torch.tensor([5.0, 6.0])))
        assert pulled(worker, [1, 2]) == [5, 6]


def test_filters_save_bytes_on_the_way():
    with run(2, 1) as nodes:
        cache, fixed, zipped = kv.KeyCache(), kv.FixedPoint(16, seed=3), kv.Compression(6)
        worker = kv.KVWorker(nodes["worker:0"], filters=[cache, fixed, zipped])
        keys, vals, turns = spread(1000), torch.linspace(-1, 1, 1000), 5
        for _ in range(turns):
            worker.wait(worker.push(keys, vals), 10)
        out = torch.empty(1000)
        worker.wait(worker.pull(keys, out), 10)
        assert (out - turns * vals).abs().max() < (turns + 1) * turns / 32767
        assert cache.saved_bytes == turns * (8000 - 2 * 16)
        assert fixed.saved_bytes == (turns + 1) * 2000
        assert zipped.saved_bytes > 100
        plain = torch.empty(1000)
        worker.wait(worker.pull(keys, plain, filters=[]), 10)
        assert torch.allclose(out, plain, atol=turns / 32767)


def test_a_push_that_was_not_sent_leaves_nothing_in_filters():
    with run(1, 1) as nodes:
        filters = [kv.TopK(0.5), kv.FixedPoint(16)]
        worker = kv.KVWorker(nodes["worker:0"], filters=filters)
        said = said_by(lambda: worker.push([1, 2], torch.tensor([torch.nan, 8.0])), ConfigError)
        assert "FixedPoint cannot encode nan" in said
        for vals in ([4.0, 1.0], [0.0, 0.0]):  # what is left out of the first comes with the other
            worker.wait(worker.push([1, 2], torch.tensor(vals)), 10)
        assert pulled(worker, [1, 2], filters=[]) == [4, 1]


def test_small_requests_take_a_few_milliseconds_at_most():
    with run(1, 1) as nodes:
        worker = kv.KVWorker(nodes["worker:0"])
        vals, best = torch.ones(4), float("inf")
        for _ in range(50):
            begin = time.perf_counter()
            worker.wait(worker.push([1, 2], vals), 10)
            best = min(best, time.perf_counter() - begin)
        assert best < 5e-3, best


def test_a_node_that_nobody_expects_is_refused():
    from braid.ps.kv.messages import SCHEMA
    from braid.runtime.message import LocalNetwork

    network = LocalNetwork(SCHEMA)
    scheduler = kv.KVNode(network.join("scheduler"), "scheduler", 0, (1, 1), "-")
    server = kv.KVNode(network.join("server:4"), "server", 4, (1, 1), "-")
    starting = threading.Thread(
        target=lambda: said.append(said_by(lambda: scheduler.start(0.5), BraidError))
    )
    said: list[str] = []
    starting.start()
    assert "server:4 does not belong to the run, which has 1 servers, 1 workers" in said_by(
        lambda: server.start(5), PeerLostError
    )
    starting.join()
    assert "server:0, worker:0 did not join" in said[0]
    scheduler.abort()
    server.abort()
