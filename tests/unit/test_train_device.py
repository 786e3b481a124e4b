"""The device of a rank and its peak: chosen by one rule, found by the name that a driver gives."""

from __future__ import annotations

import pytest
import torch

from braid.cli import main
from braid.errors import ConfigError
from braid.plan.profiling import read_profile
from braid.programs.topology import DEVICES, find_device
from braid.runtime.clock import MonotonicClock
from braid.train.config import MODELS, TrainConfig
from braid.train.device import CPU, RankDevice, choose_device
from braid.train.gpt import GPT, mean_loss

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(n)`: torch sees n GPUs, which are H100."""

    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: H100)

    return see


def test_auto_is_the_gpu_of_the_local_rank_or_the_cpu(gpus):
    gpus(0)
    assert choose_device("auto", 1, 2) == choose_device("cpu") == CPU
    gpus(2)
    assert choose_device("cpu", 1, 2) == CPU
    for wanted in ("auto", "cuda"):
        chosen = [choose_device(wanted, rank, 3) for rank in range(3)]
        assert [str(place.device) for place in chosen] == ["cuda:0", "cuda:1", "cuda:0"]
        assert [place.num_ranks for place in chosen] == [2, 1, 2]


def test_cuda_without_a_gpu_is_refused_before_a_rank_starts(gpus, capfd, tmp_path):
    gpus(0)
    problem = "--device cuda: torch sees no GPU on this machine. Use --device cpu"
    with pytest.raises(ConfigError, match=problem):
        choose_device("cuda")
    for words in (["train", "--log-dir", str(tmp_path)], ["profile", "--model", "tiny"]):
        assert main([*words, "--device", "cuda"]) == 2
        assert problem in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_devices_and_dtypes_are_listed():
    with pytest.raises(ConfigError) as caught:
        TrainConfig(device="tpu", dtype="fp8")
    assert str(caught.value) == (
        "device must be one of auto, cpu, cuda, got 'tpu'; dtype must be one of fp32, bf16, got "
        "'fp8'"
    )


def test_a_model_of_the_users_own_is_not_moved(capfd):
    assert main(["profile", "train:make", "--dtype", "bf16"]) == 2
    assert "--device and --dtype need --model" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (H100, "h100-80gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-SXM4-80GB", "a100-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_a_device_is_found_by_the_name_that_torch_gives(name, key):
    assert find_device(name) is DEVICES[key]


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "NVIDIA L40S",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "cpu",
        "",
    ],
)
def test_other_forms_of_a_chip_are_not_taken_for_it(name):
    assert find_device(name) is None


def test_mfu_compares_with_the_rank_s_part_of_the_data_sheet(gpus):
    gpus(1)
    place = RankDevice(torch.device("cuda", 0), num_ranks=2)
    source = "NVIDIA H100 SXM data sheet, 2023"
    assert place.peak("bf16", MonotonicClock()) == (989e12 / 2, f"{source}, bf16")
    assert place.peak("fp32", MonotonicClock()) == (67e12 / 2, f"{source}, fp32")


def test_the_peak_of_an_unlisted_device_is_measured():
    peak, source = CPU.peak("fp32", MonotonicClock())
    assert peak > 1e8
    assert source == "measured with matrix products on all of them"


def test_bf16_is_of_matrix_products_only():
    tokens = torch.arange(12).view(2, 6)
    losses, seen = [], []
    for dtype in ("fp32", "bf16"):
        model = GPT(MODELS["tiny"], 8, dtype=dtype)
        model.blocks[0].up.register_forward_hook(lambda _m, _x, y: seen.append(y.dtype))
        logits = model(tokens)
        loss = mean_loss(logits, tokens)
        loss.backward()
        losses.append(loss.item())
        grads = {param.grad.dtype for param in model.parameters()}
        assert {logits.dtype, loss.dtype, *grads} == {torch.float32}
    assert seen == [torch.float32, torch.bfloat16]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_profile_says_with_which_dtype_it_was_measured(tmp_path, capfd):
    out = str(tmp_path / "profile.json")
    words = ["profile", "--model", "tiny", "--context", "8", "--seconds", "0.02", "--out", out]
    assert main([*words, "--dtype", "bf16"]) == 0
    assert "tiny on cpu in bf16, 1 thread" in capfd.readouterr().out
    assert read_profile(out).dtype == "bf16"
