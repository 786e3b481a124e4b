"""Many tensors as one: where views lie in a flat buffer."""

from __future__ import annotations

import torch

from braid.parallel.gradients import FlatBuffer


def make(shape, dtype):
    return torch.zeros(tuple(shape), dtype=dtype)


def shapes(*numels):
    return [torch.Size((numel,)) for numel in numels]


def test_views_lie_one_behind_the_other():
    buffer = FlatBuffer(shapes(3, 0, 2), torch.float32, make)
    assert buffer.starts == [0, 3, 3]
    for number, view in enumerate(buffer.views):
        view.fill_(number + 1)
    assert buffer.tensor.tolist() == [1, 1, 1, 3, 3]
    assert buffer.firsts().tolist() == [0, 3, 3]


def test_views_begin_where_they_are_aligned():
    buffer = FlatBuffer(shapes(3, 0, 5, 4), torch.float64, make, align=4)
    assert buffer.starts == [0, 4, 4, 12]
    assert buffer.tensor.numel() == 16
    for number, view in enumerate(buffer.views):
        view.fill_(number + 1)
    assert buffer.tensor.tolist() == [1, 1, 1, 0, *[3] * 5, 0, 0, 0, 4, 4, 4, 4]


def test_a_buffer_of_nothing_is_empty():
    buffer = FlatBuffer([], torch.float32, make, align=8)
    assert buffer.tensor.numel() == 0
    assert buffer.views == buffer.starts == []
    assert buffer.firsts().tolist() == []


def test_views_take_the_strides_of_tensors_that_fill_their_memory():
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    holes = torch.empty(4, 6)[:, ::2]
    like = [image, holes]
    buffer = FlatBuffer([x.shape for x in like], torch.float32, make, like=like)
    assert buffer.views[0].stride() == image.stride()
    assert buffer.views[1].is_contiguous()
    assert buffer.views[1].storage_offset() == image.numel()
