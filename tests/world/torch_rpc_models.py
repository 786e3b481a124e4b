"""Four programs in the form of torch's examples: models that are divided by remote calls.

Each program has a function of a rank, which the processes of the program call. The first node
returns whether the program has given what one process gives, or whether it has learned.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch_rpc_names import DistributedOptimizer, RemoteModule, dist_autograd, rpc

RRef = rpc.RRef
SEEDING = threading.Lock()  # a node makes several modules at the same time


def _call_method(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method: Any, rref: Any, *args: Any, **kwargs: Any) -> Any:
    args = [method, rref, *args]
    return rpc.rpc_sync(rref.owner(), _call_method, args=args, kwargs=kwargs)


def _parameter_rrefs(module: nn.Module) -> list[Any]:
    return [RRef(param) for param in module.parameters()]


def _options() -> Any:
    return rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=60)


def _equal(references: list[Any], params: list[torch.Tensor]) -> bool:
    pairs = zip(references, params, strict=True)
    return all(torch.allclose(a.to_here(), b, atol=1e-5) for a, b in pairs)


# -- rnn: embedding and decoder on a parameter server, the LSTM in the trainer


class EmbeddingTable(nn.Module):
    def __init__(self, ntoken: int, ninp: int) -> None:
        super().__init__()
        with SEEDING:
            torch.manual_seed(1)
            self.encoder = nn.Embedding(ntoken, ninp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).cpu()


class Decoder(nn.Module):
    def __init__(self, ntoken: int, nhid: int) -> None:
        super().__init__()
        with SEEDING:
            torch.manual_seed(2)
            self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x)


class RNNModel(nn.Module):
    def __init__(self, ps: str, ntoken: int, ninp: int, nhid: int) -> None:
        super().__init__()
        self.emb_table_rref = rpc.remote(ps, EmbeddingTable, args=(ntoken, ninp))
        torch.manual_seed(3)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder_rref = rpc.remote(ps, Decoder, args=(ntoken, nhid))

    def forward(self, x: torch.Tensor, hidden: Any) -> Any:
        emb = _remote_method(EmbeddingTable.forward, self.emb_table_rref, x)
        output, hidden = self.rnn(emb, hidden)
        return _remote_method(Decoder.forward, self.decoder_rref, output), hidden

    def parameter_rrefs(self) -> list[Any]:
        remote_params = []
        remote_params.extend(_remote_method(_parameter_rrefs, self.emb_table_rref))
        remote_params.extend(_parameter_rrefs(self.rnn))
        remote_params.extend(_remote_method(_parameter_rrefs, self.decoder_rref))
        return remote_params


def _rnn_alone(data: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    table, decoder = EmbeddingTable(10, 4), Decoder(10, 6)
    torch.manual_seed(3)
    rnn = nn.LSTM(4, 6)
    params = [*table.parameters(), *rnn.parameters(), *decoder.parameters()]
    opt = optim.SGD(params, lr=0.05)
    hidden: Any = (torch.zeros(1, 2, 6), torch.zeros(1, 2, 6))
    for _ in range(3):
        opt.zero_grad()
        output, hidden = rnn(table(data), tuple(state.detach() for state in hidden))
        functional.cross_entropy(decoder(output).view(-1, 10), target).backward()
        opt.step()
    return params


def rnn(rank: int) -> bool:
    """Train a language model, the server being node 1; world size 2."""
    name = ["trainer", "ps"][rank]
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=_options())
    result = True
    if rank == 0:
        data = torch.arange(6).view(3, 2) % 10
        target = (data + 1).view(-1)
        model = RNNModel("ps", 10, 4, 6)
        opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.05)
        hidden: Any = (torch.zeros(1, 2, 6), torch.zeros(1, 2, 6))
        for _ in range(3):
            with dist_autograd.context() as context_id:
                hidden[0].detach_()
                hidden[1].detach_()
                output, hidden = model(data, hidden)
                loss = functional.cross_entropy(output.view(-1, 10), target)
                dist_autograd.backward(context_id, [loss])
                opt.step(context_id)
        result = _equal(model.parameter_rrefs(), _rnn_alone(data, target))
    rpc.shutdown()
    return result


# -- pipeline: two shards of a convolutional network, and micro-batches


class Shard(nn.Module):
    def __init__(self, device: str, number: int) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self.device = device
        torch.manual_seed(number)
        if number == 1:
            self.seq = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()).to(device)
        else:
            self.seq = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(4, 3)).to(device)

    def forward(self, x_rref: Any) -> torch.Tensor:
        x = x_rref.to_here().to(self.device)
        with self._lock:
            out = self.seq(x)
        return out.cpu()

    def parameter_rrefs(self) -> list[Any]:
        return [RRef(param) for param in self.parameters()]


class DistNet(nn.Module):
    def __init__(self, split_size: int, workers: list[str]) -> None:
        super().__init__()
        self.split_size = split_size
        self.p1_rref = rpc.remote(workers[0], Shard, args=("cpu", 1), timeout=0)
        self.p2_rref = rpc.remote(workers[1], Shard, args=("cpu", 2), timeout=0)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        out_futures = []
        for x in iter(xs.split(self.split_size, dim=0)):
            y_rref = self.p1_rref.remote().forward(RRef(x))
            out_futures.append(self.p2_rref.rpc_async().forward(y_rref))
        return torch.cat(torch.futures.wait_all(out_futures))

    def parameter_rrefs(self) -> list[Any]:
        remote_params = []
        remote_params.extend(self.p1_rref.remote().parameter_rrefs().to_here())
        remote_params.extend(self.p2_rref.remote().parameter_rrefs().to_here())
        return remote_params


def pipeline(rank: int) -> bool:
    """Train two shards in nodes 1 and 2; world size 3."""
    name = ["master", "worker1", "worker2"][rank]
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=_options())
    result = True
    if rank == 0:
        model = DistNet(2, ["worker1", "worker2"])
        opt = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.05)
        alone = nn.Sequential(Shard("cpu", 1).seq, Shard("cpu", 2).seq)
        own = optim.SGD(alone.parameters(), lr=0.05)
        torch.manual_seed(0)
        for _ in range(3):
            inputs, labels = torch.rand(6, 1, 4, 4), torch.eye(3).repeat(2, 1)
            with dist_autograd.context() as context_id:
                outputs = model(inputs)
                dist_autograd.backward(context_id, [functional.mse_loss(outputs, labels)])
                opt.step(context_id)
            own.zero_grad()
            functional.mse_loss(alone(inputs), labels).backward()
            own.step()
        result = _equal(model.parameter_rrefs(), [*alone.parameters()])
    rpc.shutdown()
    return result


# -- parameter_server: the model on a server, which a trainer trains


class ParameterServer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return self.model(inp).cpu()

    def get_dist_gradients(self, cid: int) -> dict[torch.Tensor, torch.Tensor]:
        grads = dist_autograd.get_gradients(cid)
        return {k.to("cpu"): v.to("cpu") for k, v in grads.items()}

    def get_param_rrefs(self) -> list[Any]:
        return [rpc.RRef(param) for param in self.model.parameters()]


param_server = None
global_lock = threading.Lock()


def get_parameter_server() -> ParameterServer:
    global param_server  # noqa: PLW0603 - as in the program of PyTorch
    with global_lock:
        if not param_server:
            param_server = ParameterServer()
        return param_server


class TrainerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.param_server_rref = rpc.remote("parameter_server", get_parameter_server)

    def get_global_param_rrefs(self) -> list[Any]:
        return _remote_method(ParameterServer.get_param_rrefs, self.param_server_rref)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _remote_method(ParameterServer.forward, self.param_server_rref, x)


def parameter_server(rank: int) -> bool:
    """Train in node 1 the model of node 0; world size 2."""
    if rank == 0:
        rpc.init_rpc("parameter_server", rank=rank, world_size=2)
        rpc.shutdown()
        return True
    rpc.init_rpc(f"trainer_{rank}", rank=rank, world_size=2)
    net, alone = TrainerNet(), ParameterServer()
    opt = DistributedOptimizer(optim.SGD, net.get_global_param_rrefs(), lr=0.2)
    own = optim.SGD(alone.parameters(), lr=0.2)
    torch.manual_seed(rank)
    for _ in range(5):
        data = torch.randn(16, 4)
        target = (data.sum(1) > 0).long()
        with dist_autograd.context() as cid:
            dist_autograd.backward(cid, [functional.cross_entropy(net(data), target)])
            grads = _remote_method(ParameterServer.get_dist_gradients, net.param_server_rref, cid)
            assert len(grads) == 4
            opt.step(cid)
        own.zero_grad()
        functional.cross_entropy(alone(data), target).backward()
        own.step()
    result = _equal(net.get_global_param_rrefs(), [*alone.parameters()])
    rpc.shutdown()
    return result


# -- ddp_rpc: an embedding table on a server, data parallel layers in the trainers

EMBEDDINGS, DIM = 20, 6


class HybridModel(nn.Module):
    def __init__(self, remote_emb_module: Any) -> None:
        super().__init__()
        self.remote_emb_module = remote_emb_module
        torch.manual_seed(5)
        self.fc = DistributedDataParallel(nn.Linear(DIM, 4))

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.fc(self.remote_emb_module.forward(indices, offsets))


def _run_trainer(remote_emb_module: Any, rank: int) -> tuple[list[float], torch.Tensor]:
    model = HybridModel(remote_emb_module)
    model_parameter_rrefs = model.remote_emb_module.remote_parameters()
    model_parameter_rrefs.extend(RRef(param) for param in model.fc.parameters())
    opt = DistributedOptimizer(optim.SGD, model_parameter_rrefs, lr=0.5)
    losses = []
    for _ in range(25):
        indices = torch.arange(rank, EMBEDDINGS, 2)
        offsets = torch.arange(0, len(indices), 2)
        target = torch.arange(len(offsets)) % 4
        with dist_autograd.context() as context_id:
            loss = functional.cross_entropy(model(indices, offsets), target)
            dist_autograd.backward(context_id, [loss])
            opt.step(context_id)
        losses.append(loss.item())
    return losses, model.fc.module.weight.detach()


def ddp_rpc(rank: int) -> bool:
    """Train in nodes 0 and 1 with the table in node 3, led by node 2; world size 4."""
    options = _options()
    options.init_method = f"tcp://localhost:{os.environ['MASTER_PORT']}"
    result = True
    if rank == 2:
        rpc.init_rpc("master", rank=rank, world_size=4, rpc_backend_options=options)
        table = RemoteModule("ps", nn.EmbeddingBag, args=(EMBEDDINGS, DIM), kwargs={"mode": "sum"})
        futs = [rpc.rpc_async(f"trainer{k}", _run_trainer, args=(table, k)) for k in (0, 1)]
        results = [fut.wait() for fut in futs]
        result = torch.equal(results[0][1], results[1][1])
        result &= all(losses[-1] < 0.5 * losses[0] for losses, _ in results)
    elif rank <= 1:
        address = f"tcp://localhost:{os.environ['DDP_PORT']}"
        torch.distributed.init_process_group("gloo", address, rank=rank, world_size=2)
        rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=4, rpc_backend_options=options)
    else:
        rpc.init_rpc("ps", rank=rank, world_size=4, rpc_backend_options=options)
    rpc.shutdown()
    if rank <= 1:
        torch.distributed.destroy_process_group()
    return result
