"""Unmodified models of Hugging Face and timm are captured, and their replay in parts has their bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from braid.errors import ConfigError
from braid.parallel.graph import capture
from capture_checks import check_replay, check_written

pytestmark = pytest.mark.frameworks
transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 99, "use_cache": False}
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_head=2, n_embd=16, bos_token_id=1, eos_token_id=2, **TEXT)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, **TEXT
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=99
        )
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            image_size=16, patch_size=4, num_labels=5,
        )
    ),
}  # fmt: skip


T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, **TEXT}


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=0, pad_token_id=0, **T5)
    )


MODELS["t5"] = MODELS["t5 with a mask"] = MODELS["t5 with labels"] = t5


def reentrant() -> Any:
    model = MODELS["gpt2"]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of a new name
        model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


MODELS["gpt2 with checkpoints"] = reentrant


def _tokens(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(1, 99, (rows, length), generator=generator)


def _images(size: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def images(rows: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(rows)
        return {"x": torch.randn(rows, 3, size, size, generator=generator)}

    return images


def _batch(name: str, rows: int) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": _images(16)(rows)["x"]}
    if not name.startswith("t5"):
        return {"input_ids": _tokens(rows, 7)}
    batch = {"input_ids": _tokens(rows, 9)}
    batch["labels" if "labels" in name else "decoder_input_ids"] = _tokens(rows, 5)
    if "mask" in name:  # of four dims: one of two dims is looked at between the modules
        keep = torch.arange(9) < torch.arange(5, 5 + rows)[:, None]
        batch["attention_mask"] = keep[:, None, None, :]
    return batch


@pytest.mark.parametrize("name", MODELS)
def test_the_replay_in_parts_has_the_outputs_and_gradients_of_the_model(name):
    check_replay(MODELS[name], lambda rows: _batch(name, rows))


@pytest.mark.parametrize("name", MODELS)
def test_written_stages_have_the_outputs_and_gradients_of_the_model(name, tmp_path):
    check_written(MODELS[name], lambda rows: _batch(name, rows), 3, tmp_path / "out")


def test_a_cache_and_a_mask_of_two_dims_are_refused_by_line():
    model, batch = t5(), _batch("t5", 4)
    with pytest.raises(ConfigError, match=r"modeling_t5.py:\d+ gets a EncoderDecoderCache"):
        capture(model, **batch, use_cache=True)
    with pytest.raises(
        ConfigError, match=r"a condition at .*masking_utils.py:\d+ makes control flow of the model"
    ):
        capture(model, **batch, attention_mask=torch.ones(4, 9))


TIMM: dict[str, tuple[dict[str, Any], int]] = {
    "vit_tiny_patch16_224": (
        {"img_size": 32, "depth": 4, "embed_dim": 24, "num_heads": 2, "drop_path_rate": 0.2}, 32
    ),
    "resnet10t": ({"drop_rate": 0.1}, 32),
    "densenet121": ({"growth_rate": 4, "block_config": (2, 2, 2, 2)}, 32),
    "swin_tiny_patch4_window7_224": (
        {"img_size": 56, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2)}, 56
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TIMM)
def test_models_of_timm_have_the_bits_of_the_model_too(name, tmp_path):
    try:
        import timm
    except (ImportError, RuntimeError) as exc:  # torchvision of another version of torch
        pytest.skip(f"timm cannot be imported: {exc}")
    options, size = TIMM[name]
    check_replay(lambda: timm.create_model(name, num_classes=5, **options), _images(size))
    check_written(
        lambda: timm.create_model(name, num_classes=5, **options),
        _images(size),
        3,
        tmp_path / "out",
    )
