"""Layers and containers of torch.nn are sent as plain data; other modules and hooks are refused."""

from __future__ import annotations

import msgspec
import pytest
import torch
from test_rpc_codec import codec_of, ext, round_trip
from torch import nn
from torch.nn import functional

from braid.errors import CommError
from braid.rpc.outcomes import RpcError


class Own(nn.Module):
    pass


class Pair(nn.Linear):
    pass


SHAPES = {  # a module, and the shapes of its inputs
    "convolutions": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5)),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)),
        ),
        [(4, 2, 4, 4)],
    ),
    "lstm": (lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True), [(5, 2, 3)]),
    "gru": (lambda: nn.GRU(3, 4, bias=False, batch_first=True), [(5, 2, 3)]),
    "cells": (lambda: nn.LSTMCell(3, 4), [(2, 3)]),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, activation=functional.gelu, batch_first=True), 2
        ),
        [(2, 3, 8)],
    ),
    "transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        [(2, 3, 8), (2, 4, 8)],
    ),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
        [(3, 2, 8), (5, 2, 4), (5, 2, 6)],
    ),
    "weighted loss": (lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0])), [(3, 2), (3, 2)]),
    "normalized": (
        lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.PReLU(), nn.Softmax(dim=-1)),
        [(3, 4)],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("training", [False, True])
def test_a_layer_computes_the_same_at_the_receiver(name, training):
    make, shapes = SHAPES[name]
    torch.manual_seed(1)
    module = make().train(training)
    back = round_trip([module])[0]
    assert str(back) == str(module)
    for key, value in module.state_dict().items():
        assert torch.equal(back.state_dict()[key], value)
        assert back.state_dict()[key].data_ptr() != value.data_ptr()
    inputs = [torch.rand(*shape, requires_grad=True) for shape in shapes]
    outputs = []
    for each in (module, back):
        torch.manual_seed(2)
        out = each(*inputs)
        first = out[0] if isinstance(out, tuple) else out
        first.sum().backward()
        outputs.append((first, [p.grad for p in each.parameters()]))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    assert [m.training for m in back.modules()] == [m.training for m in module.modules()]


def test_shared_parameters_flags_and_buffers_stay_as_they_are():
    inner = nn.Linear(2, 2)
    tied = nn.Linear(2, 2)
    tied.weight = inner.weight
    inner.bias.requires_grad_(False)
    frozen = nn.Dropout().eval()
    network = nn.ModuleDict(
        {"a": nn.ModuleList([inner, tied, inner]), "b": frozen, "c": nn.ParameterList([inner.bias])}
    )
    network.a.register_buffer("kept", torch.ones(1))
    network.a.register_buffer("transient", torch.zeros(1), persistent=False)
    network.a.note = ("text", {"x": 1})
    inner.weight.grad = torch.ones(2, 2)
    back = round_trip(network)
    first, second, third = back.a
    assert first is third
    assert first.weight is second.weight
    assert back.c[0] is first.bias
    assert [p.requires_grad for p in back.parameters()] == [True, False, True]
    assert first.weight.grad is None
    assert not back.b.training
    assert back.training
    assert list(back.state_dict()) == list(network.state_dict())
    assert back.a.transient.tolist() == [0]
    assert back.a.note == ("text", {"x": 1})


def test_modules_that_would_lose_a_part_are_refused_by_name():
    hooked, replaced, lazy = nn.Linear(1, 1), nn.Linear(1, 1), nn.LazyLinear(1)
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = functional.relu
    refused = [
        (Own(), "Own, and only modules of torch.nn can be sent: construct the module in the other"),
        (nn.Sequential(nn.ReLU(), Pair(1, 1)), r"a value\.1 is a .*Pair, and only modules"),
        (hooked, "a Linear with _forward_hooks, which would be lost"),
        (replaced, "a Linear with forward, which would be lost"),
        (lazy, "a LazyLinear with _|UninitializedParameter"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(1, 1)), "ParametrizedLinear, and only"),
        (nn.DataParallel(nn.Linear(1, 1)), "DataParallel, and only modules of torch.nn"),
    ]
    for module, text in refused:
        with pytest.raises(RpcError, match=text):
            codec_of().pack(module, 0)


def test_a_stranger_constructs_no_other_module_and_replaces_no_method():
    linear = "torch.nn.modules.linear.Linear"
    tensors = [[msgspec.msgpack.Ext(7, b"\0"), True, True]]

    def entry(name=linear, children=None, params=None, buffers=None, extra=None):
        return [name, True, children or {}, params or {}, buffers or {}, extra or {}]

    attempts = [
        entry("torch.nn.modules.module.Module"),
        entry("torch.nn.modules.linear.math"),
        entry("torch.nn.parallel.data_parallel.DataParallel"),
        entry(f"{__name__}.Own"),
        entry("os.system"),
        entry(["x"]),
        entry(extra={"forward": ext(14, "torch:relu")}),
        entry(extra={"_compiled_call_impl": ext(14, "torch:neg")}),
        entry(extra={"_flat_weights": []}),
        entry(extra={"_version": 1}),
        entry(extra={"__class__": 1}),
        entry(extra={"_forward_hooks": {}}),
        entry(children={"x": 0}),
        entry(children={"a.b": None}),
        entry(params={"weight": 7}),
        entry(params={"forward": 0}),
        entry("torch.nn.modules.rnn.LSTM"),
    ]
    for attempt in attempts:
        data = msgspec.msgpack.encode(ext(23, [[attempt], tensors]))
        with pytest.raises((CommError, RpcError)):
            codec_of().unpack(data, [torch.ones(2)], "stranger")
    data = msgspec.msgpack.encode(ext(23, [[entry(params={"weight": 0})], tensors]))
    assert codec_of().unpack(data, [torch.ones(2)], "w0").weight.tolist() == [1, 1]


def test_a_stranger_cannot_fill_the_memory_with_copies_of_one_tensor():
    def layer(*places):
        tensors = [[msgspec.msgpack.Ext(7, place), True, True] for place in places]
        params = {f"p{number}": number for number in range(len(places))}
        return ext(23, [[["torch.nn.modules.linear.Linear", True, {}, params, {}, {}]], tensors])

    mapped = msgspec.msgpack.encode([1, "cpu"])
    for value in (
        layer(b"\0", b"\0"),
        [layer(b"\0"), layer(b"\0")],
        layer(b"\1", mapped),
        layer(b"\1", msgspec.msgpack.encode([-1, "cpu"])),
    ):
        with pytest.raises(CommError, match="stranger sent values that name tensor"):
            codec_of().unpack(msgspec.msgpack.encode(value), [torch.ones(2)] * 2, "stranger")
    assert codec_of().unpack(
        msgspec.msgpack.encode(layer(b"\0", mapped)), [torch.ones(2)] * 2, "w0"
    ).p1.tolist() == [1, 1]


def test_tensors_that_occur_twice_in_a_message_arrive():
    shared = nn.Parameter(torch.ones(2))
    tied = nn.ParameterList([shared, nn.Parameter(shared.data), shared])
    first, second, tensor = round_trip([tied, nn.ParameterList([shared]), shared.detach()])
    assert first[0] is first[2]
    assert [one.tolist() for one in (*first, *second, tensor)] == [[1, 1]] * 5
