"""Programs for torch's RPC run after their imports change, and read what torch lets them read."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.compat.torch_rpc import RemoteModule, dist_autograd, rpc
from braid.errors import ConfigError
from braid.rpc.current import acting_for
from rpc_nodes import first_of, nodes


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.inner = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
        return self.factor * x + plus


class Plain:
    def __init__(self, tensor: torch.Tensor, rref: Any = None) -> None:
        self.tensor, self.rref = tensor, rref

    def double(self) -> torch.Tensor:
        return self.tensor * 2


def same(value: Any) -> Any:
    return value


def use(module: RemoteModule, x: torch.Tensor) -> torch.Tensor:
    return module(x, plus=1.0)


def doubled(plain: Plain) -> torch.Tensor:
    return plain.double() + plain.rref.to_here()


def not_a_module() -> int:
    return 3


def is_training(rref: rpc.RRef[nn.Module]) -> bool:
    return rref.local_value().training


EXAMPLES = (
    *("rnn", "pipeline", "parameter_server", "rl"),
    *("batch_parameter_server", "batch_reinforce", "ddp_rpc"),
)


def output_of(program: str, *args: str, num_ports: int = 1, **variables: str) -> list[str]:
    """Run a program that spawns its nodes, with free ports after `args`; return what it prints."""
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for each in free:
            each.bind(("127.0.0.1", 0))
        ports = [str(each.getsockname()[1]) for each in free]
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("BRAID_", "RANK", "WORLD_SIZE"))
    }
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": ports[0], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(program)), *args, *ports],
        capture_output=True,
        text=True,
        timeout=120,
        env={**kept, **own, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_program_that_spawns_its_nodes_runs():
    """A parameter server, an RNN over two nodes, and a remote module that a third node uses."""
    assert output_of("torch_rpc_program.py") == [
        "weights [[-0.5, -0.5, -0.5], [-0.5, -0.5, -0.5]]",
        "same True",
        "module True worker1 {2}",
        "open 0",
    ]


def test_programs_in_the_form_of_torchs_seven_examples_give_what_one_process_gives_or_learn():
    output = output_of("torch_rpc_examples.py", ",".join(EXAMPLES), num_ports=8)
    assert output == ["ended: " + " ".join(EXAMPLES)]


@pytest.mark.proof
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_same_programs_run_on_torch(name):
    output = output_of("torch_rpc_examples.py", name, num_ports=2, RPC_FROM="torch")
    assert output == [f"ended: {name}"]


def test_calls_are_rows_of_the_profiler():
    with first_of(2), torch.profiler.profile() as profile:
        rpc.rpc_sync("w1", torch.add, args=(torch.ones(2), 1))
        rpc.rpc_async("w1", same, args=(3,)).wait()
        rpc.remote("w1", same, args=(4,)).confirmed_by_owner()
        with pytest.raises(RuntimeError, match="cannot be called by name"):
            rpc.rpc_sync("w1", same, args=(lambda: 0,))
    rows = [event.name for event in profile.events() if "#" in event.name]
    assert sorted(row.replace(f"{__name__}:", "") for row in rows) == [
        "remote#same(w0 -> w1)",
        "rpc_async#same(w0 -> w1)",
        "rpc_sync#same(w0 -> w1)",
        "rpc_sync#torch:add(w0 -> w1)",
    ]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*deprecated")
def test_a_function_of_torchscript_is_refused():
    scripted = torch.jit.script(functional.softsign)
    with first_of(2), pytest.raises(RuntimeError, match="compiled by torch"):
        rpc.rpc_sync("w1", scripted, args=(torch.ones(2),))


def test_a_remote_module_is_used_as_a_module():
    with first_of(3) as agents:
        module = RemoteModule("w1/cpu", Scaled, args=(3.0,))
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        assert isinstance(module, nn.Module)
        assert module(x).tolist() == [3, 6]
        assert module.forward_async(x, plus=1.0).wait().tolist() == [4, 7]
        assert len(module.remote_parameters()) == 3
        assert [each.to_here().item() for each in module.remote_parameters(recurse=False)] == [3]
        again = RemoteModule.init_from_module_rref("rank:1/cpu", module.get_module_rref())
        assert again(x).tolist() == [3, 6]
        module.eval()
        assert not rpc.rpc_sync("w1", is_training, (module.get_module_rref(),))
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync("w2", use, (module, x))
            assert y.tolist() == [4, 7]
            dist_autograd.backward(context_id, [y.sum()])
            assert dist_autograd.get_gradients(context_id)[x].tolist() == [3, 3]
        back = rpc.rpc_sync("w2", same, (module,))
        assert (back.on, back(x).tolist()) == ("w1", [3, 6])
        for name in ("parameters", "state_dict", "cuda", "register_buffer"):
            with pytest.raises(ValueError, match=f"Method ``{name}`` not supported"):
                getattr(module, name)()
        with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule"):
            pickle.dumps(module)
        with pytest.raises(ValueError, match=r"returns an instance of <class nn\.Module>"):
            RemoteModule("w1", not_a_module)(x)
        for place in ("", "w1/", "rank:x/cpu", "w1/nothing", "w7/cpu"):
            with pytest.raises(ConfigError):
                RemoteModule(place, Scaled, args=(1.0,))
        assert [each.info.name for each in agents] == ["w0", "w1", "w2"]


def test_programs_read_what_is_under_way():
    with first_of(2):
        assert rpc._is_current_rpc_agent_set() in {True, False}
        agent = rpc._get_current_rpc_agent()
        assert agent.get_worker_infos() == [rpc.WorkerInfo("w0", 0), rpc.WorkerInfo("w1", 1)]
        assert agent.get_worker_info(1).name == "w1"
        info = rpc._get_debug_info()
        assert info["agent.num_pending_requests"] == "0"
        assert info["num_owner_rrefs"] == "0"
        mine = rpc.RRef(torch.ones(2))
        assert rpc._rref_context_get_debug_info()["num_owner_rrefs"] == "0", "nobody else has it"
        theirs = rpc.remote("w1", same, (mine,))
        assert theirs.to_here().to_here().tolist() == [1, 1]
        begin = time.monotonic()
        while rpc._rref_context_get_debug_info()["num_owner_rrefs"] != "1":
            assert time.monotonic() - begin < 10
        own = rpc.remote("w0", same, (5,))
        assert (own.to_here(), own.is_owner()) == (5, True), "its call may not have begun"
        rpc._set_rpc_timeout(7.0)
        assert rpc.get_rpc_timeout() == 7.0


def test_contexts_are_read_as_in_torch():
    with first_of(2):
        x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            z = rpc.rpc_sync("w1", torch.add, (x, y))
            own = dist_autograd._current_context()
            assert (
                own._context_id()
                == context_id
                == dist_autograd._retrieve_context(context_id)._context_id()
            )
            assert own._known_worker_ids() == {1}
            (send,), (receive,) = own._send_functions().values(), own._recv_functions().values()
            assert send.name() == "torch::distributed::autograd::SendRpcBackward"
            assert [
                each.variable is x or each.variable is y for each, _ in send.next_functions
            ] == [True, True]
            assert receive is z.grad_fn
            assert receive.name() == "torch::distributed::autograd::RecvRpcBackward"
            with pytest.raises(RuntimeError, match="Already have an autograd context"):
                dist_autograd._new_context()
        with pytest.raises(RuntimeError, match="Could not find autograd context"):
            dist_autograd._retrieve_context(context_id)
        assert context_id <= dist_autograd._get_max_id()
        with pytest.raises(RuntimeError, match="no autograd context"):
            dist_autograd._current_context()


def test_gradients_of_sparse_tensors_pass_through_calls():
    def leaf() -> torch.Tensor:
        values = torch.tensor([3.0, 4.0, 5.0])
        return torch.sparse_coo_tensor(
            [[0, 1, 1], [2, 0, 2]], values, (2, 3), requires_grad=True, check_invariants=False
        )

    with first_of(2):
        a, b, alone, other = leaf(), leaf(), leaf(), leaf()
        torch.sparse.sum(torch.add(alone, other)).backward()
        with dist_autograd.context() as context_id:
            total = torch.sparse.sum(rpc.rpc_sync("w1", torch.add, (a, b)))
            dist_autograd.backward(context_id, [total])
            grads = dist_autograd.get_gradients(context_id)
            assert torch.equal(grads[a].to_dense(), alone.grad.to_dense())
            assert torch.equal(grads[b].to_dense(), other.grad.to_dense())


class Fragile(torch.autograd.Function):
    """Doubles its input; its backward raises while `fails`."""

    fails = False

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fragile.fails:
            msg = "this backward fails"
            raise LookupError(msg)
        return 2 * grad


def test_gradients_share_no_memory_and_a_context_works_again_after_an_error(monkeypatch):
    with first_of(2), dist_autograd.context() as context_id:
        a, b = (torch.ones(3, requires_grad=True) for _ in range(2))

        def backward() -> None:
            total = rpc.rpc_sync("w1", torch.add, (Fragile.apply(a + b), 1)).sum()
            dist_autograd.backward(context_id, [total])

        with monkeypatch.context() as patch:
            patch.setattr(Fragile, "fails", True)
            with pytest.raises(RuntimeError, match="LookupError: this backward fails"):
                backward()
        backward()
        grads = dist_autograd.get_gradients(context_id)
        grads[a].mul_(0.5)
        assert (grads[a].tolist(), grads[b].tolist()) == ([1.0] * 3, [2.0] * 3)
        for wrong in ("a", torch.ones(2)):  # no tensor, and a shape that does not fit
            with pytest.raises(RuntimeError, match="On w1"):
                rpc.rpc_sync("w1", torch.add, (a, wrong))


def test_pickle_carries_what_plain_calls_refuse():
    with first_of(2), pytest.raises(ConfigError, match="allow_pickle=True"):
        rpc.rpc_sync("w1", same, (Plain(torch.ones(1)),))
    with first_of(2, allow_pickle=True):
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync("w1", doubled, (Plain(x, rpc.RRef(1.0)),))
            dist_autograd.backward(context_id, [y.sum()])
            assert dist_autograd.get_gradients(context_id)[x].tolist() == [2, 2]
        assert rpc.rpc_sync("w1", Plain(x).double).tolist() == [2, 2], "a bound method"
        assert rpc.rpc_sync("w1", max, (3, 4)) == 4


def test_nodes_gather_and_wait_for_each_other():
    with nodes(3) as agents:
        results: dict[str, Any] = {}

        def take_part(place: int) -> None:
            with acting_for(agents[place]):
                rpc._barrier(["w0", "w1", "w2"])
                results[f"w{place}"] = rpc._all_gather(place * 10)

        threads = [threading.Thread(target=take_part, args=(place,)) for place in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(30)
        assert results == {f"w{n}": {"w0": 0, "w1": 10, "w2": 20} for n in range(3)}
        with acting_for(agents[0]):
            with pytest.raises(RuntimeError, match=r"timed out in _all_gather after 0\.10 seconds"):
                rpc._all_gather(1, timeout=0.1)
            with rpc._wait_all():
                future = rpc.rpc_async("w1", same, (1,))
            assert future.done()


class OtherOptions(rpc.RpcBackendOptions):
    pass


def waits_or_fails(seconds: float) -> None:
    if not seconds:
        msg = "this one fails"
        raise LookupError(msg)
    time.sleep(seconds)


def test_waiting_for_all_calls_ends_at_the_first_error():
    with first_of(2):
        began = time.monotonic()
        with pytest.raises(LookupError, match="this one fails"), rpc._wait_all():
            calls = [rpc.rpc_async("w1", waits_or_fails, (seconds,)) for seconds in (2.0, 0.0)]
        assert not calls[0].done()
        assert time.monotonic() - began < 1.5


def test_mistakes_are_errors_of_torch():
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        rpc.init_rpc("w0", rpc_backend_options=OtherOptions())
    for name in ("abc*", "", "a" * 500):
        with pytest.raises(RuntimeError, match="1 to 128 letters, digits"):
            rpc.WorkerInfo(name, 0)
    with pytest.raises(TypeError, match="member of BackendType"):
        rpc.init_rpc("w0", backend="tensorpipe")
    with pytest.raises(TypeError, match="instance of RpcBackendOptions"):
        rpc.init_rpc("w0", rpc_backend_options={"rpc_timeout": 3})
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.get_worker_info()
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"w1": {0: 1}}, devices=[0])
    assert (options.device_maps, options.devices) == ({"w1": {"cuda:0": "cuda:1"}}, ["cuda:0"])
    with pytest.raises(ValueError, match="1-to-1"):
        options.set_device_map("w1", {1: 1})
    with pytest.raises(ValueError, match="CUDA devices"):
        options.set_devices(["cpu"])
    with first_of(2):
        for wrong in (lambda: rpc.get_worker_info("w9"), lambda: rpc.rpc_sync("w1", lambda: 1)):
            with pytest.raises(
                RuntimeError, match=r"node '.*' does not exist|cannot be called by name"
            ):
                wrong()
        theirs = rpc.remote("w1", same, (torch.ones(()),))
        with pytest.raises(RuntimeError, match="lives in w1"):
            theirs.local_value()
        with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id'"):
            theirs.backward()
        with pytest.raises(RuntimeError, match="Can not pickle rref"):
            pickle.dumps(theirs)
        assert theirs._get_type() is torch.Tensor
