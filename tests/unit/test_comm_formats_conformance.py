"""What all wire formats promise: bounds, exact lengths, nothing believed that came over a network."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from braid.comm.formats import BF16, FLOAT16, FLOAT32, Int8, TopKFormat, WireFormat, by_name
from braid.errors import CommError, ConfigError

MAX = torch.finfo(torch.float32).max
FORMATS = (
    "float32",
    "bf16",
    "float16",
    "int8",
    "int8:stochastic",
    "topk:0.01",
    "topk:0.3",
    "topk:1",
)
SIZES = (
    0,
    1,
    2,
    255,
    256,
    257,
    1000,
    65536,
    65536 + 300,
)  # blocks and chunks, and what is left of them

every_format = pytest.mark.parametrize("name", FORMATS)
ORDINARY = st.floats(-1e4, 1e4, width=32)
ANY_FINITE = st.floats(-MAX, MAX, width=32)


def form_of(name: str) -> WireFormat:
    return by_name(name, generator=torch.Generator().manual_seed(7))


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def sent(form: WireFormat, x: torch.Tensor) -> torch.Tensor:
    """The bytes of `x`; room is filled with garbage first, as a buffer that is used again is."""
    into = torch.full((form.nbytes(x.numel()),), 0xA5, dtype=torch.uint8)
    return into[: form.encode(x, into)]


def arrived(form: WireFormat, x: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, 77.0)
    form.decode(sent(form, x), out)
    return out


def alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.view(torch.int32), y.view(torch.int32))


@every_format
@pytest.mark.parametrize("numel", SIZES)
def test_no_more_is_written_than_was_promised_and_all_of_it_is_read(name, numel):
    form, x = form_of(name), noise(numel)
    room = torch.full((form.nbytes(numel) + 8,), 0xA5, dtype=torch.uint8)
    written = form.encode(x, room)
    out = torch.full_like(x, torch.nan)
    form.decode(room[:written], out)
    assert written <= form.nbytes(numel)
    assert room[written:].eq(0xA5).all()
    assert out.isfinite().all()


@every_format
@pytest.mark.parametrize("numel", SIZES)
def test_adding_is_decoding_and_a_sum(name, numel):
    form, before = form_of(name), noise(numel, seed=1)
    buffer = sent(form, noise(numel))
    decoded, added = torch.empty(numel), before.clone()
    form.decode(buffer, decoded)
    form.add(buffer, added)
    assert alike(added, before + decoded)


@every_format
def test_zeros_arrive_as_zeros(name):
    assert alike(arrived(form_of(name), torch.zeros(600)), torch.zeros(600))


@every_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_arrives_as_not_finite(name, bad):
    x = noise(1000)
    x[333] = bad
    assert not arrived(form_of(name), x)[333].isfinite()


@every_format
def test_encoding_leaves_the_numbers_alone(name):
    x = noise(700).requires_grad_()
    sent(form_of(name), x)
    assert alike(x.detach(), noise(700))


@every_format
def test_lossless_formats_are_those_that_return_every_bit(name):
    x = torch.tensor([-0.0, 1 / 3, 1e-45, MAX, -torch.inf, torch.nan])
    assert alike(arrived(form_of(name), x), x) is not form_of(name).lossy


@every_format
@given(message=st.binary(max_size=96), numel=st.integers(0, 40))
def test_arbitrary_bytes_are_decoded_or_refused_and_then_change_nothing(name, message, numel):
    form = form_of(name)
    buffer = torch.frombuffer(bytearray(message + b"\0"), dtype=torch.uint8)[: len(message)]
    out = torch.full((numel,), 5.0)
    refused = None
    try:
        form.decode(buffer, out)
    except CommError as error:
        refused = str(error)
    if refused is None:
        assert len(message) <= form.nbytes(numel)
    else:
        assert out.eq(5.0).all()
        assert re.search(r"the same format|one format on all", refused)


INDEX = st.integers(-1, 16) | st.integers(-(1 << 31), (1 << 31) - 1)


@given(
    indices=st.sets(INDEX, max_size=10).map(sorted) | st.lists(INDEX, max_size=4),
    more=st.sampled_from([0, 0, 0, 1, -1, -20]),
    add=st.booleans(),
)
@example(indices=list(range(9)), more=0, add=False)
@example(indices=[-1, 3], more=0, add=False)
@example(indices=[3, 16], more=0, add=True)
@example(indices=[4, 4], more=0, add=True)
def test_sparse_messages_are_read_only_if_their_indices_ascend_within_the_tensor(
    indices, more, add
):
    count = len(indices) + more
    words = torch.tensor([count, *indices, *[0] * len(indices)], dtype=torch.int32)
    good = (
        not more
        and count <= 8
        and all(0 <= i < 16 for i in indices)
        and indices == sorted(set(indices))
    )
    form, out = TopKFormat(0.5), torch.zeros(16)
    read = form.add if add else form.decode
    if good:
        read(words.view(torch.uint8), out)
    else:
        with pytest.raises(CommError, match=r"the same format|one format on all"):
            read(words.view(torch.uint8), out)


@pytest.mark.parametrize("scale", [torch.nan, -1.0, -torch.inf])
def test_scales_that_cannot_be_are_refused(scale):
    buffer = sent(Int8(), noise(600))
    buffer[4:8] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(CommError, match="scale of block 1 of 3"):
        Int8().decode(buffer, torch.empty(600))


@every_format
def test_a_message_cut_short_or_too_long_is_refused(name):
    form = form_of(name)
    whole = sent(form, noise(300))
    for wrong in (whole[:-1], whole[:0], torch.cat([whole, whole[:4]])):
        with pytest.raises(CommError, match="were sent"):
            form.decode(wrong, torch.empty(300))


@every_format
@pytest.mark.parametrize(
    ("x", "found"),
    [
        (torch.zeros(10)[::2], r"torch.float32 of shape \(5,\) and strides \(2,\)"),
        (torch.zeros(2, 5), r"torch.float32 of shape \(2, 5\)"),
        (torch.zeros(5, dtype=torch.float64), "torch.float64"),
    ],
)
def test_numbers_that_are_not_flat_float32_are_refused(name, x, found):
    form = form_of(name)
    with pytest.raises(ConfigError, match=f"x must be .*{found}"):
        form.encode(x, torch.empty(99, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=f"out must be .*{found}"):
        form.decode(sent(form, torch.zeros(5)), x)


@every_format
def test_room_that_is_too_small_unaligned_or_no_bytes_is_refused(name):
    form, x = form_of(name), noise(100)
    room = torch.empty(1000, dtype=torch.uint8)
    for wrong, found in (
        (room[: form.nbytes(100) - 1], f"into has {form.nbytes(100) - 1} bytes"),
        (room[2:], "offset 2: make both multiples"),
        (room[::2], r"strides \(2,\)"),
        (torch.empty(1000), "torch.float32"),
    ):
        with pytest.raises(ConfigError, match=found):
            form.encode(x, wrong)


@every_format
def test_numbers_and_bytes_on_two_devices_are_refused(name):
    form = form_of(name)
    elsewhere = torch.empty(10, device="meta")
    with pytest.raises(ConfigError, match="on meta, but the bytes are on cpu"):
        form.encode(elsewhere, torch.empty(99, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("form", "relative", "absolute", "largest"),
    [(BF16, 2.0**-8, 2.0**-134, 3.38e38), (FLOAT16, 2.0**-11, 2.0**-25, 65504.0)],
    ids=["bf16", "float16"],
)
@given(
    values=st.lists(ANY_FINITE | ORDINARY | st.floats(-(2.0**-13), 2.0**-13, width=32), min_size=1)
)
def test_casts_keep_their_bound(form, relative, absolute, largest, values):
    x = torch.tensor(values).clamp(-largest, largest)
    error = (arrived(form, x).double() - x.double()).abs()
    assert (error <= relative * x.double().abs() + absolute).all()


@given(
    values=st.lists(
        ANY_FINITE | ORDINARY | st.floats(-(2.0**-120), 2.0**-120, width=32),
        min_size=1,
        max_size=300,
    )
)
@pytest.mark.parametrize("stochastic", [False, True])
def test_blocks_of_integers_keep_their_bound(stochastic, values):
    form = Int8(stochastic=stochastic, generator=torch.Generator().manual_seed(1))
    x = torch.tensor(values)
    for block, got in zip(x.double().split(256), arrived(form, x).double().split(256), strict=True):
        peak = block.abs().max()
        bound = peak / (127 if stochastic else 254) + 2.0**-21 * peak + 2.0**-142
        assert ((got - block).abs() <= bound).all()


def test_an_outlier_spoils_its_own_block_only():
    x = torch.full((512,), 0.5)
    x[0] = 1000.0
    assert arrived(Int8(), x)[[0, 1, 256, 511]].tolist() == [1000.0, 0.0, 0.5, 0.5]


def test_a_block_with_nan_arrives_as_nan_and_the_next_one_as_it_was():
    x = torch.ones(512)
    x[5] = torch.inf
    out = arrived(Int8(), x)
    assert out[:256].isnan().all()
    assert out[256:].eq(1.0).all()


def test_stochastic_rounding_is_right_on_average_and_the_nearest_is_not():
    x = torch.full((256 * 64,), 0.3)
    x[::256] = 127.0  # the scale is 1
    of_rest = torch.arange(x.numel()) % 256 != 0
    averages = [
        float(arrived(form_of(name), x)[of_rest].mean()) for name in ("int8", "int8:stochastic")
    ]
    # 16,320 draws of 0 or 1: the standard deviation of the average is 0.0036
    assert averages == [0.0, pytest.approx(0.3, abs=5 * 0.0036)]


def test_equal_generators_round_alike():
    x = noise(1000)
    assert alike(arrived(form_of("int8:stochastic"), x), arrived(form_of("int8:stochastic"), x))


@given(values=st.lists(ORDINARY, min_size=1, max_size=200), ratio=st.floats(0.001, 1))
def test_no_number_left_out_is_larger_than_one_that_is_sent(values, ratio):
    x, form = torch.tensor(values), TopKFormat(ratio)
    out = arrived(form, x)
    kept = out != 0
    assert alike(out[kept], x[kept])
    assert int(kept.sum()) == min(int(x.count_nonzero()), form.max_entries(x.numel()))
    left = x[~kept].abs()
    assert not left.numel() or not kept.any() or left.max() <= x[kept].abs().min()


@pytest.mark.parametrize(
    "x",
    [
        noise(300_000),
        noise(300_000) ** 9,
        torch.arange(300_000.0),
        torch.ones(300_000),
        noise(300_000).view(500, 600).mul(torch.arange(600) == 3).reshape(-1),  # one column
    ],
    ids=["normal", "heavy tails", "ramp", "all alike", "one column"],
)
def test_a_threshold_from_a_sample_sends_about_as_much_as_it_may(x):
    kept = arrived(TopKFormat(0.01), x).count_nonzero()
    possible = min(3000, int(x.count_nonzero()))
    # 655 of the sample are above the threshold: four standard deviations are 16 %
    assert 0.84 * possible <= int(kept) <= 3000


def test_more_nan_than_may_be_sent_fill_the_message():
    x = torch.full((100,), torch.nan)
    assert arrived(TopKFormat(0.1), x).isnan().sum() == 10


def test_names_give_formats_that_say_the_same_name():
    assert [form_of(name).name for name in (*FORMATS[:-1], "topk:1.0")] == [
        *FORMATS[:-1],
        "topk:1.0",
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "fp8",
            "choose one of float32, bf16, float16, int8, int8:stochastic, topk:RATIO",
        ),
        ("bf16:fast", "no wire format 'bf16:fast'"),
        ("int8:random", "no wire format 'int8:random'"),
        ("topk", "ratio in 'topk' is not a number"),
        ("topk:few", "ratio in 'topk:few' is not a number"),
        ("topk:0", "got 0.0"),
        ("topk:1.5", "got 1.5"),
        ("topk:nan", "got nan"),
        ("rank-4", "use LowRank"),
        ("int8:stochastic", "needs a torch.Generator"),
    ],
)
def test_names_that_mean_nothing_are_refused(name, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        by_name(name)


def test_bytes_are_as_documented():
    assert bytes(sent(FLOAT32, torch.tensor([1.0]))) == bytes.fromhex("0000803f")
    assert bytes(sent(BF16, torch.tensor([1.0]))) == bytes.fromhex("803f")
    assert bytes(sent(Int8(), torch.tensor([127.0, -2.0]))) == bytes.fromhex("0000803f 7ffe")
    assert bytes(sent(TopKFormat(0.5), torch.tensor([0.5, 0.0, 0.0, -1.0]))) == bytes.fromhex(
        "02000000 00000000 03000000 0000003f 000080bf"
    )
