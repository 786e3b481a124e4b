"""Memory that the planner predicts for a training on a device, beside what it takes."""

from __future__ import annotations

import pytest
import torch
from gpu_models import CONTEXT, SIZE, language_model, loss_of, tokens

from braid.comm.autograd.layer_costs import PeakBytes
from braid.plan.described import DescribedMachines
from braid.plan.search import Estimator, Split, Training
from braid.programs.topology import DEVICES, Cluster, Level
from braid.train.models import described


def _measured(device: str, sequences: int) -> float:
    model = language_model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = tokens(device, 0, sequences)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    step()
    known = [*model.parameters(), *(p.grad for p in model.parameters())]
    known += [v for state in optimizer.state.values() for v in state.values()]
    with PeakBytes(known) as noted:
        step()
    return float(noted.live.peak_bytes)


@pytest.mark.parametrize("sequences", [1, 2, 4, 8, 16, 32])
def test_memory_of_a_step_is_as_predicted(device, figures, sequences):
    if device == "cpu" and sequences > 4:
        pytest.skip("takes long on a CPU")
    of_table = DEVICES["a100-40gb"]
    model, _ = described("", SIZE[device], CONTEXT[device], of_table, "fp32")
    level = Level(name="host", size=1, latency_s=1e-6, bytes_per_s=1e12)
    machines = DescribedMachines(Cluster([level]), of_table, dtype="fp32")
    predicted = Estimator(model, machines, Training(sequences)).memory(Split()).nbytes
    measured = _measured(device, sequences)
    figures(
        sequences=sequences,
        predicted_mb=round(predicted / 1e6, 1),
        measured_mb=round(measured / 1e6, 1),
        error_percent=round(100 * (predicted / measured - 1), 1),
    )
    assert abs(predicted / measured - 1) < 0.5
