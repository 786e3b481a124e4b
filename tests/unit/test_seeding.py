"""Keyed random numbers: what they depend on, and what they do not depend on."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from braid.runtime.seeding import Draws, key_of, random_words, uniform


def test_philox_gives_the_words_of_its_paper():
    # known answers of Random123: counter and key of zeros, and of ones
    words = random_words(0, torch.tensor([0]), 4)[0].tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    sample = -1  # 64 bits of ones; the element's number cannot be chosen, so only half is known
    assert random_words(0, torch.tensor([sample]), 4).min() >= 0


def test_a_number_depends_on_key_sample_and_element_only():
    whole = uniform(7, torch.arange(10), 6)
    assert torch.equal(uniform(7, torch.tensor([8, 3]), 6), whole[[8, 3]])
    assert torch.equal(uniform(7, torch.arange(10), 3), whole[:, :3])
    assert not torch.equal(uniform(8, torch.arange(10), 6), whole)
    assert uniform(7, torch.arange(0), 6).shape == (0, 6)


def test_numbers_are_uniform_and_uncorrelated():
    numbers = uniform(key_of("a", 1), torch.arange(256), 256).double()
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 5e-3
    assert abs(numbers.var() - 1 / 12) < 2e-3
    flat = numbers.flatten() - 0.5
    assert abs((flat[1:] * flat[:-1]).mean()) < 2e-3
    assert abs(((numbers[1:] - 0.5) * (numbers[:-1] - 0.5)).mean()) < 2e-3


def drawn(module: nn.Module, x: torch.Tensor, samples: range, **where: int) -> torch.Tensor:
    with Draws(where.get("seed", 0), where.get("step", 0), samples).layer("layer"):
        return module(x)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Dropout(0.4), (6, 5)),
        (nn.Dropout(0.4), (6, 3, 2, 2)),
        (nn.Dropout1d(0.4), (6, 8, 3)),
        (nn.Dropout2d(0.4), (6, 8, 2, 2)),
        (nn.Sequential(nn.Flatten(0, 1), nn.Dropout(0.3)), (6, 4, 2)),
        (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), (6, 4, 8)),
    ],
)
def test_dropout_is_the_same_in_any_micro_batch(module, shape):
    x = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 1
    whole = drawn(module, x, range(20, 26))
    parts = [drawn(module, x[:4], range(20, 24)), drawn(module, x[4:], range(24, 26))]
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not torch.equal(drawn(module, x, range(20, 26), step=1), whole)
    assert not torch.equal(drawn(module, x, range(20, 26), seed=1), whole)
    assert not torch.equal(drawn(module, x, range(26)[20:]), module.eval()(x))


def test_two_dropouts_of_a_layer_drop_other_elements():
    twice = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    kept = drawn(twice, torch.ones(64, 64), range(64)).count_nonzero() / 64**2
    assert 0.2 < kept < 0.3


def test_dropout_keeps_the_mean_drops_the_share_and_works_in_place():
    ones = torch.ones(128, 128, dtype=torch.bfloat16)
    out = drawn(nn.Dropout(0.25, inplace=True), ones, range(128))
    assert out is ones
    assert abs((out == 0).float().mean() - 0.25) < 0.01
    assert abs(out.float().mean() - 1) < 0.02


@pytest.mark.parametrize(
    ("is_causal", "mask"), [(False, None), (True, None), (False, "bool"), (False, "float")]
)
def test_attention_with_dropout_is_attention_on_average(is_causal, mask):
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(512, 2, 5, 4, generator=generator) for _ in range(3))
    q[:], k[:], v[:] = q[:1], k[:1], v[:1]
    allowed = torch.ones(5, 5, dtype=torch.bool).tril(1)
    bias = torch.zeros(5, 5).masked_fill(~allowed, -1e9)
    given = {"bool": allowed, "float": bias, None: None}[mask]
    attend = functional.scaled_dot_product_attention
    with Draws(0, 0, range(512)).layer("layer"):
        dropped = attend(q, k, v, given, dropout_p=0.3, is_causal=is_causal)
        plain = attend(q, k, v, given, dropout_p=0.0, is_causal=is_causal)
    torch.testing.assert_close(plain, attend(q, k, v, given, is_causal=is_causal))
    assert (dropped.mean(0) - plain[0]).abs().max() < 0.2
    assert not torch.allclose(dropped, plain)


def test_other_random_functions_draw_by_layer_step_and_first_sample():
    def numbers(samples: range, name: str = "a") -> torch.Tensor:
        with Draws(0, 3, samples).layer(name):
            x = torch.rand(2, 2)
            noise = torch.empty(2, 2).normal_()
            return torch.stack([x, torch.randn_like(x), noise, torch.bernoulli(x / 2 + 0.25)])

    before = torch.get_rng_state()
    assert torch.equal(numbers(range(4, 6)), numbers(range(4, 8)))
    assert not torch.equal(numbers(range(4, 6)), numbers(range(5, 6)))
    assert not torch.equal(numbers(range(4, 6)), numbers(range(4, 6), "b"))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_is_given_is_used():
    with Draws(0, 0, range(1)).layer("a"):
        x = torch.rand(3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(x, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_keys_tell_parts_apart():
    assert len({key_of(1, 2), key_of(12), key_of("1", 2), key_of(2, 1), key_of(1, "2")}) == 5
