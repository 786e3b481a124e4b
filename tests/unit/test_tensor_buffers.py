"""Tensors beside messages: every kind comes back, without a copy where there need not be one."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import CommError, ConfigError
from braid.runtime.message import Schema
from braid.runtime.tensor_buffers import as_buffers, bytes_of, from_buffers, memory_of
from braid.types import TensorSpec
from support.simulated_van import Network


class Tensors(msgspec.Struct, tag="tensors", frozen=True):
    specs: list[TensorSpec]


def two_vans():
    network = Network(Schema(Tensors))
    vans = network.join("worker:0"), network.join("worker:1")
    vans[0].connect("worker:1")
    return vans


def every_kind():
    base = torch.arange(24.0).reshape(4, 6)
    return [
        base,
        base.t(),
        base[1::2, ::3],
        base[:, :0],
        torch.empty(0),
        torch.tensor(2.5),
        torch.tensor(3, dtype=torch.int64),
        base.bfloat16(),
        base.half().requires_grad_(),
        base.double() * 1e-300,
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.uint8),
        torch.complex(base, -base).conj(),
        base.to(torch.float8_e5m2),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.broadcast_to(torch.tensor(1.0), (3, 2)),
    ]


def same(one, other):
    one = one.detach().resolve_conj().contiguous()
    return (one.shape, one.dtype) == (other.shape, other.dtype) and bytes(memory_of(one)) == bytes(
        memory_of(other)
    )


def test_every_kind_of_tensor_comes_back():
    sender, receiver = two_vans()
    tensors = every_kind()
    specs, buffers = as_buffers(tensors)
    sender.send("worker:1", Tensors(specs), buffers=buffers)
    delivery = receiver.recv(10)
    found = from_buffers(delivery.message.specs, delivery.buffers)
    assert [same(a, b) for a, b in zip(tensors, found, strict=True)] == [True] * len(tensors)
    assert [spec.requires_grad for spec in delivery.message.specs].count(True) == 1


def test_contiguous_tensors_are_not_copied():
    tensor = torch.zeros(10)
    _, (buffer,) = as_buffers([tensor])
    tensor[3] = 7
    (found,) = from_buffers([TensorSpec((10,), "float32")], [buffer])
    assert (found[3].item(), found.data_ptr()) == (7.0, tensor.data_ptr())


def test_tensors_arrive_in_tensors_that_exist():
    sender, receiver = two_vans()
    mine = torch.zeros(3, 4)
    receiver.receive_into(Tensors, lambda *_: [memory_of(mine)])
    specs, buffers = as_buffers([torch.ones(3, 4)])
    sender.send("worker:1", Tensors(specs), buffers=buffers)
    (found,) = from_buffers(specs, receiver.recv(10).buffers)
    assert (mine.sum().item(), found.data_ptr()) == (12.0, mine.data_ptr())


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        (TensorSpec((3,), "float32"), 8),
        (TensorSpec((-1, -2), "float32"), 8),
        (TensorSpec((2,), "nn"), 8),
        (TensorSpec((2,), "load"), 8),
        (TensorSpec((1 << 40, 1 << 40), "float32"), 8),
    ],
)
def test_specs_that_lie_are_refused(spec, nbytes):
    with pytest.raises(CommError, match=r"but its buffer has|is not the spec of a tensor"):
        from_buffers([spec], [memoryview(bytearray(nbytes))])


def test_missing_buffers_are_refused():
    with pytest.raises(CommError, match="1 tensors need the same number of buffers, got 0"):
        from_buffers([TensorSpec((1,), "float32")], [])


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")])
def test_tensors_without_plain_memory_are_refused(tensor):
    with pytest.raises(ConfigError, match="cannot send a tensor of"):
        as_buffers([tensor])


def test_memory_in_pieces_is_refused():
    with pytest.raises(ConfigError, match="contiguous"):
        memory_of(torch.zeros(4, 4).t())


def test_the_package_imports_no_torch():
    code = "import sys, braid.runtime.message; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8),
    *(torch.bool, torch.complex64, torch.complex128),
]
VIEWS = {
    "transposed": lambda x: x.transpose(0, -1),
    "a dim of one element": lambda x: x[:, :1],
    "a column": lambda x: x[..., 0],
    "one element": lambda x: x[:1, 0],
    "every other": lambda x: x[::2],
    "expanded": lambda x: x[None].expand(2, *x.shape),
    "conjugate": torch.conj,
    "imaginary part": lambda x: x.conj().imag if x.is_complex() else x,
    "negative": lambda x: x if x.dtype in {torch.bool, torch.uint8} else torch._neg_view(x),
    "no elements": lambda x: x[:0],
    "trained": lambda x: x.requires_grad_(x.is_floating_point() or x.is_complex()),
}


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(1, 3), min_size=2, max_size=3),
    views=st.lists(st.sampled_from(sorted(VIEWS)), max_size=3),
)
def test_bytes_of_any_view_are_those_of_its_values(dtype, shape, views):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.complex128)
    x = (x if dtype.is_complex else x.real.abs() * 3).to(dtype)
    for name in views:
        if x.dim() > 1:
            x = VIEWS[name](x.detach())
    found = bytearray(bytes_of(x))
    assert len(found) == x.numel() * x.element_size()
    if found:
        assert torch.equal(torch.frombuffer(found, dtype=x.dtype).reshape(x.shape), x)


def test_memory_of_a_lazy_view_is_refused():
    for lazy in (torch._neg_view(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()):
        with pytest.raises(ConfigError, match="is not contiguous memory"):
            memory_of(lazy)
