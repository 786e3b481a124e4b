"""Dense shards: the bits of torch's optimizers, reads that do not change, states that come back."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from braid.errors import ConfigError
from braid.ps.storage import FTRL, SGD, Adagrad, Adam, DenseStorage, RowWiseAdagrad, SumStorage

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.1),
    "Rprop": partial(torch.optim.Rprop, lr=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
    "Adamax": partial(torch.optim.Adamax, lr=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.1),
}
RULES = {"rule SGD": SGD(0.1, momentum=0.9), "rule Adam": Adam(0.1), "rule FTRL": FTRL(0.1)}


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def values_of(storage):
    return storage.read(())[0].clone()


def train(storage, steps, first=0):
    for step in range(first, first + steps):
        pushes = [(numbers(9, seed=10 * step + worker + 1),) for worker in range(3)]
        storage.apply(storage.merge(pushes, 1 / 3))


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(each, right[name]) and each.dtype == right[name].dtype
        for name, each in left.items()
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_has_its_own_bits(name):
    storage = DenseStorage(numbers(9), OPTIMIZERS[name], table="w")
    param = nn.Parameter(numbers(9))
    optimizer = OPTIMIZERS[name]([param])
    for step in range(4):
        param.grad = sum(
            (numbers(9, seed=10 * step + k + 2) for k in range(2)), numbers(9, seed=10 * step + 1)
        ).mul_(1 / 3)
        optimizer.step()
    train(storage, 4)
    assert torch.equal(values_of(storage), param.detach())


@pytest.mark.parametrize("rule", [*OPTIMIZERS.values(), *RULES.values()], ids=[*OPTIMIZERS, *RULES])
def test_training_goes_on_from_an_export_bit_by_bit(rule):
    storage, other = (DenseStorage(numbers(9), rule, table="w") for _ in range(2))
    train(storage, 3)
    storage.set_lr(0.05)
    state = storage.export()
    train(storage, 3, first=3)
    other.load(state)
    assert same(other.export(), state)
    train(other, 3, first=3)
    assert same(other.export(), storage.export())
    assert float(other.export()["lr"]) == 0.05


def test_values_that_were_read_do_not_change_and_are_copied_once():
    storage = DenseStorage(numbers(9), SGD(0.1), table="w")
    train(storage, 1)
    (first,), (again,) = storage.read(()), storage.read(())
    assert first.data_ptr() == again.data_ptr()
    before = first.clone()
    train(storage, 2)
    assert torch.equal(first, before)
    (later,) = storage.read(())
    assert later.data_ptr() != first.data_ptr()
    assert not torch.equal(later, first)


def test_an_update_without_a_reader_is_in_place():
    storage = DenseStorage(numbers(9), partial(torch.optim.SGD, lr=0.1), table="w")
    place = storage._values.data_ptr()
    train(storage, 3)
    assert storage._values.data_ptr() == place


def test_an_update_is_not_written_to():
    update = (numbers(9, seed=4),)
    for rule in (SGD(0.1, momentum=0.9, weight_decay=0.1), Adam(0.1), OPTIMIZERS["SGD"]):
        storage = DenseStorage(numbers(9), rule, table="w")
        storage.apply(update)
        storage.apply(update)
        assert torch.equal(update[0], numbers(9, seed=4))


def test_pushes_are_added_in_order_and_scaled_once():
    storage = SumStorage(torch.zeros(9), table="w")
    pushes = [(numbers(9, seed=k),) for k in range(4)]
    expected = ((pushes[0][0] + pushes[1][0]) + pushes[2][0] + pushes[3][0]) * 0.25
    (update,) = storage.merge(pushes, 0.25)
    assert torch.equal(update, expected)
    storage.apply((update,))
    assert torch.equal(values_of(storage), expected)
    other = SumStorage(torch.zeros(9), table="w")
    other.load(storage.export())
    assert torch.equal(values_of(other), expected)


def test_sums_need_no_memory_of_their_own():
    storage = SumStorage(torch.zeros(9), table="w")
    first = numbers(9)
    storage.apply(storage.merge([(first,), (numbers(9, seed=1),)], 1.0))
    (lent,) = storage.read(())
    assert lent.data_ptr() == first.data_ptr()
    before = lent.clone()
    storage.apply(storage.merge([(numbers(9, seed=2),)], 1.0))
    assert torch.equal(lent, before)


def test_pushes_may_have_gaps_in_memory():
    storage = DenseStorage(numbers(18)[::2], SGD(1.0), table="w")
    assert torch.equal(values_of(storage), numbers(18)[::2])
    grads = [numbers(18, seed=1)[::2], torch.ones(1).expand(9)]
    for each in grads:
        storage.check((each,))
    storage.apply(storage.merge([(grads[1],), (grads[0],)], 1.0))
    assert torch.equal(values_of(storage), numbers(18)[::2] - (1 + numbers(18, seed=1)[::2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_keep_their_state_in_float32_or_more(dtype):
    storage = DenseStorage(numbers(9, dtype=dtype), Adagrad(0.1), table="w")
    storage.apply((numbers(9, seed=1, dtype=dtype),))
    reference = DenseStorage(numbers(9, dtype=dtype).double(), Adagrad(0.1), table="w")
    reference.apply((numbers(9, seed=1, dtype=dtype).double(),))
    state = storage.export()
    assert state["values"].dtype == dtype
    assert state["state.sum"].dtype == torch.promote_types(dtype, torch.float32)
    # float32 arithmetic, and one rounding to the dtype
    torch.testing.assert_close(
        state["values"].double(), values_of(reference), rtol=torch.finfo(dtype).eps, atol=1e-6
    )


def test_a_shard_may_be_empty():
    for rule in (Adam(0.1), partial(torch.optim.Adam, lr=0.1)):
        storage = DenseStorage(torch.zeros(0), rule, table="w")
        storage.apply(storage.merge([(torch.zeros(0),)], 1.0))
        assert values_of(storage).shape == (0,)
        storage.load(storage.export())


class Unknown(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.LBFGS, "LBFGS does not: it takes inner products of all parameters"),
        (torch.optim.Adafactor, "Adafactor does not: it uses the shape or the norm"),
        (
            Unknown,
            "Unknown does not: it is not known to change each element separately. Use a class of torch.optim, such as SGD",
        ),
        (RowWiseAdagrad(0.1), "RowWiseAdagrad needs whole rows"),
        (len, "returned a int, not an optimizer"),
        (
            lambda params: torch.optim.SGD([*params, nn.Parameter(torch.ones(2))]),
            "groups of \\[2\\]",
        ),
    ],
)
def test_optimizers_that_do_not_change_each_element_by_itself_are_refused(make, text):
    with pytest.raises(ConfigError, match=f"table 'w': .*{text}"):
        DenseStorage(torch.zeros(4), make, table="w")


@pytest.mark.parametrize(
    ("push", "text"),
    [
        (
            (torch.zeros(3),),
            r"a push does not match the table: expected grad float32\[4\], got float32\[3\]. Declare the same",
        ),
        ((torch.zeros(4, 1),), r"expected grad float32\[4\], got float32\[4, 1\]"),
        ((torch.zeros(4).double(),), r"expected grad float32\[4\], got float64\[4\]"),
        ((), r"a push has 1 tensors \(grad float32\[4\]\), got 0 \(none\)"),
        ((torch.zeros(4),) * 2, r"got 2 \(float32\[4\], float32\[4\]\)"),
        ((torch.zeros(4).to_sparse(),), r"got float32\[4\] \(torch.sparse_coo\)"),
    ],
)
def test_a_push_that_does_not_fit_is_named(push, text):
    for storage in (
        DenseStorage(torch.zeros(4), SGD(0.1), table="w"),
        SumStorage(torch.zeros(4), table="w"),
    ):
        with pytest.raises(ConfigError, match=f"table 'w': .*{text}"):
            storage.check(push)
        storage.check((torch.zeros(4),))
        storage.check_query(())
        with pytest.raises(ConfigError, match="a query has 0 tensors"):
            storage.check_query((torch.zeros(1),))


def test_values_must_be_a_vector_of_floats():
    with pytest.raises(ConfigError, match=r"got values of shape \[2, 2\]: pass values.flatten"):
        DenseStorage(torch.zeros(2, 2), SGD(0.1), table="w")
    with pytest.raises(ConfigError, match="a floating dtype, got int64"):
        SumStorage(torch.zeros(2, dtype=torch.int64), table="w")


def test_a_state_that_does_not_fit_changes_nothing():
    storage = DenseStorage(numbers(4), Adam(0.1), table="w")
    storage.apply((torch.ones(4),))
    state = storage.export()
    wrong = [
        ({}, "lacks values, updates"),
        ({**state, "values": torch.zeros(3)}, r"expected values float32\[4\], got float32\[3\]"),
        (
            {**state, "state.exp_avg": torch.zeros(3)},
            r"expected state.exp_avg float32\[4\], got float32\[3\]",
        ),
        ({name: each for name, each in state.items() if name != "state.step"}, "lacks state.step"),
        ({**state, "other": torch.zeros(1)}, "has the unknown other"),
        ({**state, "lr": torch.tensor(-1.0)}, "lr must be in"),
    ]
    for each, text in wrong:
        with pytest.raises(ConfigError, match=text):
            storage.load(each)
    assert same(storage.export(), state)
    optimizer = DenseStorage(numbers(4), OPTIMIZERS["Adam"], table="w")
    with pytest.raises(ConfigError, match=r"expected state.exp_avg of shape"):
        optimizer.load({**state, "state.exp_avg": torch.zeros(3)})
    with pytest.raises(ConfigError, match="it lacks lr; it has the unknown other"):
        optimizer.load(
            {"values": torch.zeros(4), "updates": torch.tensor(1), "other": torch.tensor(1)}
        )
    sums = SumStorage(torch.zeros(4), table="w")
    with pytest.raises(ConfigError, match=r"has the unknown lr, state.exp_avg"):
        sums.load(state)
    with pytest.raises(ConfigError, match="has no optimizer"):
        sums.set_lr(0.1)
    for each in (storage, optimizer):
        with pytest.raises(ConfigError, match="-1"):
            each.set_lr(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_16_bit_pushes_are_rounded_once(dtype):
    storage = DenseStorage(torch.zeros(2, dtype=dtype), SGD(1.0), table="w")
    pushes = [(torch.tensor([1.0, 100.0], dtype=dtype),) for _ in range(1024)]
    (total,) = storage.merge(pushes, 0.5)
    assert total.tolist() == [512.0, 51200.0]  # the sum of the second is beyond float16
