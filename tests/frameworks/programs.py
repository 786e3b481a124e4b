"""Short trainings with other people's libraries, as their users write them; each returns its losses.

    python programs.py NAME BACKEND FILE     as one rank; the losses go to FILE

Ranks come from the environment, as torchrun sets it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

NUM_STEPS = 4
NUM_CLASSES = 5


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, NUM_CLASSES))


class Rows(torch.utils.data.Dataset):
    """Rows of random numbers with labels."""

    def __init__(self, count: int = 32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 8, generator=generator)
        self.y = torch.randint(0, NUM_CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches."""
    rows = Rows()
    for step in range(NUM_STEPS):
        chosen = slice(8 * step + 4 * dist.get_rank(), 8 * step + 4 * dist.get_rank() + 4)
        yield rows.x[chosen], rows.y[chosen]


def train(model: nn.Module, loss_of: Callable[[nn.Module, int], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def rows_loss(model: nn.Module, step: int) -> torch.Tensor:
    x, y = list(batches())[step]
    return cross_entropy(model(x), y)


def wrapped(module: nn.Module) -> nn.Module:
    """Wrap as torch does, or, where the program is told so, by braid's class."""
    if os.environ.get("WRAPPER") == "braid":
        from braid import DistributedDataParallel
    else:
        from torch.nn.parallel import DistributedDataParallel
    return DistributedDataParallel(module)


def lightning_trainer(backend: str) -> list[float]:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[float] = []

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # ranks have been started by somebody else
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    module = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Rows(), batch_size=4))
    assert dist.get_backend() == backend
    return module.losses


def accelerator(_backend: str) -> list[float]:
    from accelerate import Accelerator

    own = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    model, optimizer, loader = own.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        with own.accumulate(model):
            loss = cross_entropy(model(x), y)
            own.backward(loss)
            own.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.extend(own.gather(loss.detach()[None]).tolist())
    assert type(own.unwrap_model(model)) is nn.Sequential
    assert own.num_processes == dist.get_world_size()
    return losses


def tiny_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return GPT2LMHeadModel(config)


def tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, 64, (2, 16), generator=generator)


def language_loss(model: nn.Module, step: int) -> torch.Tensor:
    ids = tokens(step)
    return model(input_ids=ids, labels=ids).loss


def gpt2(_backend: str) -> list[float]:
    return train(wrapped(tiny_gpt2()), language_loss)


def llama(_backend: str) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return train(wrapped(LlamaForCausalLM(config)), language_loss)


def hf_trainer(_backend: str) -> list[float]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses: list[float] = []

    class Losses(TrainerCallback):
        def on_log(
            self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any
        ) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])

    rows = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(3))
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=4,
            max_steps=NUM_STEPS,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(
            model=tiny_gpt2(), args=arguments, train_dataset=data, callbacks=[Losses()]
        )
        trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    return losses


def fsdp2(_backend: str) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = net()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), rows_loss)


def checkpoints(_backend: str) -> list[float]:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    folder = os.environ["FOLDER"]
    losses = []
    for part in range(2):
        torch.manual_seed(part)  # other weights, which the checkpoint replaces
        model = fully_shard(net(), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if part:
            weights, state = get_state_dict(model, optimizer)
            checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        for step in range(2):
            optimizer.zero_grad()
            loss = rows_loss(model, 2 * part + step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights, state = get_state_dict(model, optimizer)
        if not part:
            checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return losses


def compiled_inside(_backend: str) -> list[float]:
    return train(wrapped(torch.compile(net(), backend="aot_eager")), rows_loss)


def compiled_outside(_backend: str) -> list[float]:
    return train(torch.compile(wrapped(net()), backend="aot_eager"), rows_loss)


def pipeline(_backend: str) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    model = net()
    part = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
    rows = Rows()
    found = []
    for step in range(NUM_STEPS):
        x, y = rows.x[8 * step : 8 * step + 8], rows.y[8 * step : 8 * step + 8]
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=y, losses=losses)
            found.append(float(torch.stack(losses).mean()))
        optimizer.step()
    return found


def picture_loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(2, 3, 32, 32, generator=generator)
    return cross_entropy(model(x), torch.tensor([step, dist.get_rank()]))


def timm_resnet18(_backend: str) -> list[float]:
    import timm

    return train(wrapped(timm.create_model("resnet18", num_classes=NUM_CLASSES)), picture_loss)


def timm_vit(_backend: str) -> list[float]:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=NUM_CLASSES, img_size=32, depth=2, embed_dim=48
    )
    return train(wrapped(model), picture_loss)


PROGRAMS = {
    program.__name__: program
    for program in (
        lightning_trainer,
        accelerator,
        hf_trainer,
        gpt2,
        llama,
        fsdp2,
        checkpoints,
        compiled_inside,
        compiled_outside,
        pipeline,
        timm_resnet18,
        timm_vit,
    )
}
# Lightning makes the group itself
MAKE_GROUPS = {"lightning_trainer"}


def main(name: str, backend: str, path: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if name not in MAKE_GROUPS:
        dist.init_process_group(backend)
    torch.manual_seed(0)
    losses = PROGRAMS[name](backend)
    assert dist.get_backend() == backend
    Path(path).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
