"""The norm of gradients in pieces has the bits of the whole."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid.parallel.gradients.exact_norm import BLOCK, clip_pieces_, exact_norm


@given(st.lists(st.integers(0, 80), max_size=4), st.integers(-30, 18), st.integers(0, 9))
def test_cuts_and_order_change_no_bit(cuts, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1001, generator=generator) * 10.0**exponent
    y = torch.randn(7, 9, generator=generator)
    bounds = [0, *sorted(min(1001, cut * BLOCK) for cut in cuts), 1001]
    pieces = [x[a:b] for a, b in pairwise(bounds)]
    whole = exact_norm([x, y])
    assert exact_norm([y, *reversed(pieces)]).item() == whole.item()
    expected = math.hypot(x.double().norm().item(), y.double().norm().item())
    assert whole.item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_other_norms_are_those_of_torch(norm_type):
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    expected = torch.linalg.vector_norm(x, norm_type)
    assert exact_norm([x[:32], x[32:]], norm_type=norm_type).item() == pytest.approx(
        expected.item(), rel=1e-6
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_gradient_makes_the_norm_nonfinite(value):
    x = torch.ones(40)
    x[3] = value
    assert not exact_norm([x]).isfinite()
    with pytest.raises(ConfigError, match="norm of the gradients"):
        clip_pieces_([x], 1.0, error_if_nonfinite=True)


def test_no_gradient_and_zeros_have_no_norm():
    assert exact_norm([]).item() == exact_norm([torch.zeros(3), torch.zeros(0)]).item() == 0
    assert exact_norm([torch.full((5,), 1e-300, dtype=torch.float64)]).item() == 0
    with pytest.raises(ConfigError, match="norm_type"):
        exact_norm([], norm_type=0)
    with pytest.raises(ConfigError, match="max_norm"):
        clip_pieces_([], -1.0)
