"""Small values of a pipeline arrive from one packed message as they were sent."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.comm.autograd.nested import flatten, unflatten
from braid.parallel.pipeline.messages import PACKED_BYTES, Messages, _header, _Layout, _Packed
from braid.parallel.pipeline.sent_structure import SentSpec

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


def arrived(value: object) -> object:
    """Return the value of the message of a value."""
    tree, tensors = flatten(value)
    specs = tuple(map(SentSpec.of, tensors))
    layout = _Layout.of(specs, 1234567890123456789)
    assert layout is not None
    packed = _Packed.of(layout)
    packed.fill([torch.ones_like(x) for x in tensors])  # an earlier message
    message = packed.fill(tensors)
    assert (message.nbytes, layout.is_in(message)) == (layout.nbytes, True)
    other = layout.with_digest(_header(3))
    assert (other.nbytes, layout.is_in(other)) == (layout.nbytes, False)
    return unflatten(tree, layout.tensors_of(message.clone()))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    x = torch.empty(shape, dtype=dtype)
    x.view(-1).view(torch.uint8).random_(0, 2)
    if draw(st.booleans()) and x.dim() > 1:
        x = x.transpose(0, -1)
    if draw(st.booleans()) and x.dim() and len(x):
        x = x[::2]
    if dtype.is_complex and draw(st.booleans()):
        x = x.conj()
        x = x.imag if draw(st.booleans()) else x
    return x


@given(st.lists(tensors(), min_size=1, max_size=4))
def test_a_packed_value_arrives_with_its_bits_and_order_in_memory(sent):
    received = arrived(tuple(sent))
    for x, y in zip(sent, received, strict=True):
        assert (y.shape, y.dtype, y.requires_grad) == (x.shape, x.dtype, False)
        plain = x.resolve_conj().resolve_neg().contiguous()
        assert torch.equal(
            y.contiguous().view(-1).view(torch.uint8), plain.view(-1).view(torch.uint8)
        )
        if x.is_contiguous():
            assert y.is_contiguous()


def test_images_keep_their_order_and_gradients_are_required():
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    y = arrived({"image": x})["image"]
    assert (y.stride(), y.requires_grad, torch.equal(x, y)) == (x.stride(), True, True)


def test_a_change_in_place_of_one_tensor_does_not_concern_the_others():
    x, mask = arrived((torch.ones(3), torch.ones(3)))
    w = torch.ones(3, requires_grad=True)
    loss = (x * w).sum()
    mask.add_(1)
    loss.backward()
    assert torch.equal(w.grad, torch.ones(3))


class Marked(torch.Tensor):
    pass


def test_a_message_is_no_instance_of_a_value_s_class():
    x = torch.ones(3).as_subclass(Marked)
    specs = (SentSpec.of(x),)
    packed = _Packed.of(_Layout.of(specs, 1))
    assert {type(y) for y in (packed.fill([x]), *packed.places)} == {torch.Tensor}


def test_large_values_are_not_packed():
    spec = SentSpec.of(torch.empty(PACKED_BYTES, dtype=torch.uint8))
    assert _Layout.of((spec,), 1) is None


class LateGroup:
    """A group with sends that the test ends."""

    rank, size, ranks = 0, 2, (0, 1)

    def __init__(self) -> None:
        self.sent: list[tuple[torch.Tensor, SimpleNamespace]] = []
        self.is_late = False

    def starting(self) -> LateGroup:
        return self

    def send(self, x: torch.Tensor, _to: int, *, tag: int, async_op: bool) -> SimpleNamespace:
        assert (tag, async_op) == (0, True)
        work = SimpleNamespace(succeeded=not self.is_late, wait=lambda: None)
        work.done = lambda: work.succeeded
        self.sent.append((x, work))
        return work


def test_a_message_is_filled_again_only_after_it_has_been_sent():
    group = LateGroup()
    messages = Messages(group)
    messages.send_value(torch.zeros(3), 1)  # announces the structure
    group.sent.clear()
    for number in range(1, 4):
        group.is_late = number == 2
        messages.send_value(torch.full((3,), float(number)), 1)
    (one, _), (two, late), (three, _) = group.sent
    assert one is two  # the first one had been sent
    assert three is not two
    numbers = [x[16:28].view(torch.float32).tolist() for x in (two, three)]
    assert numbers == [[2.0] * 3, [3.0] * 3]
    late.succeeded = True
    messages.finish()
    group.sent.clear()
    for _ in range(2):
        group.is_late = True
        messages.send_value(torch.full((3,), 4.0), 1)
    assert {id(x) for x, _ in group.sent} == {id(two), id(three)}
