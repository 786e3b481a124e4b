"""A program of megatron-core gives the same numbers with `braid.compat.megatron`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_trained import WAYS

pytestmark = [pytest.mark.frameworks, pytest.mark.proof]
pytest.importorskip("megatron.core")

PROGRAM = Path(__file__).with_name("megatron_trained.py")
TIMEOUT_S = 120


def results(folder: Path, library: str, way: str) -> list[dict[str, Any]]:
    """Run the program; return each rank's results."""
    paths = [folder / f"{library}.{rank}" for rank in range(WAYS[way].ranks)]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(PROGRAM), library, way, str(rank)),
                *(str(folder / f"{library}.store"), str(path)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, path in enumerate(paths)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(paths), "\n".join(outputs)
    return [torch.load(path, weights_only=False) for path in paths]


@pytest.mark.parametrize("way", WAYS)
def test_losses_gradients_and_weights_are_those_of_megatron_core(tmp_path: Path, way: str) -> None:
    """Losses, gradients and weights have the same bits, but the norm of gradients is another order's sum."""
    original = results(tmp_path, "megatron.core", way)
    ours = results(tmp_path, "braid.compat.megatron", way)
    for mine, its in zip(ours, original, strict=True):
        torch.testing.assert_close(mine["grads"][:1], its["grads"][:1], rtol=0, atol=0)
        # a norm above the limit of clipping also scales gradients
        exact = {"rtol": 1e-6, "atol": 1e-7} if way == "chunks" else {"rtol": 0, "atol": 0}
        for name in ("losses", "grads", "weights"):
            torch.testing.assert_close(mine[name], its[name], **exact)
        torch.testing.assert_close(mine["steps"], its["steps"], rtol=1e-6, atol=0)
    assert any(rank["losses"][0] for rank in ours)
