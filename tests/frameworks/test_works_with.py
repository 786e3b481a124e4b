"""Other people's libraries train over braid with the digits of Gloo; a line of `docs/works_with.md` each."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.frameworks, pytest.mark.proof]

PROGRAM = Path(__file__).parent / "programs.py"
SIZE = 2
TIMEOUT_S = 300
# program -> package that it needs beside torch
NEEDS = {
    "lightning_trainer": "lightning",
    "accelerator": "accelerate",
    "hf_trainer": "transformers",
    "gpt2": "transformers",
    "llama": "transformers",
    "fsdp2": "torch",
    "checkpoints": "torch",
    "compiled_inside": "torch",
    "compiled_outside": "torch",
    "pipeline": "torch",
    "timm_resnet18": "timm",
    "timm_vit": "timm",
}
# those that wrap a module themselves, so that braid's class can stand in place of torch's
WRAPPING = ["gpt2", "llama", "compiled_inside", "compiled_outside", "timm_resnet18", "timm_vit"]


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def losses(folder: Path, program: str, backend: str, **variables: str) -> list[list[float]]:
    """Run the program on two ranks; return each rank's losses."""
    folder.mkdir(parents=True)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(SIZE),
        "FOLDER": str(folder / "checkpoint"),
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    paths = [folder / f"{rank}.json" for rank in range(SIZE)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), program, backend, str(path)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank, path in enumerate(paths)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * SIZE, "\n".join(outputs)
    return [json.loads(path.read_text()) for path in paths]


def _import_or_skip(package: str) -> None:
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # also a build for another torch
        pytest.skip(f"{package} cannot be imported: {error}")


@pytest.mark.parametrize("program", list(NEEDS))
def test_losses_over_braid_have_the_digits_of_gloo(tmp_path, program):
    needed = NEEDS[program]
    if needed != "torch" and importlib.util.find_spec("torchvision"):
        _import_or_skip("torchvision")  # all of these ask for it where it is installed
    _import_or_skip(needed)
    ours = losses(tmp_path / "braid", program, "braid")
    assert any(ours)
    assert ours == losses(tmp_path / "gloo", program, "gloo")
    if program in WRAPPING:
        assert ours == losses(tmp_path / "class", program, "braid", WRAPPER="braid")
