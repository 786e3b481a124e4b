"""Makes the pictures of README.md: `python tests/front_page.py` (needs Chromium, which draws the report's own pages).

docs/images/failure.png   the end of a failed run as its report draws it, above the block that the launcher printed
docs/images/report.png    the upper part of the report about a loop of one's own
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from braid.launch import JobSpec, Outcome, QuietConsole, Supervisor
from braid.launch.observe import build_story, publish, read_run
from braid.launch.observe.report import page_template
from proof import FAILING_JOB

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH = 1000

LOOP = """\
import torch
import braid

group = braid.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
model = braid.DistributedDataParallel(model, process_group=group)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
target = torch.randn(64, 10)
for step in range(400):
    x = torch.randn(256, 64)[group.rank :: group.size]
    loss = (model(x) - x @ target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    braid.log(step=step, loss=loss, samples=len(x), lr=scheduler.get_last_lr()[0])
"""
FAILURE = """\
{% from "figures.html.jinja" import timeline_figure with context %}
<!doctype html><html><head><meta charset="utf-8"><style>{% include "report.css" %}
body { padding: 1rem 1.25rem; } .timeline { margin-top: .4rem; } .outcome { margin-top: .6rem; font-size: .95em; }</style></head><body>
<ul class="legend"><li class="compute">compute</li><li class="wait">wait</li><li class="transfer">transfer</li>
<li class="bucket">buckets under way</li><li class="unfinished">did not end</li></ul>
{{ timeline_figure(picture) }}
<pre class="outcome bad">{{ block }}</pre></body></html>
"""


def _run(script: Path, ranks: int, log_dir: Path) -> Outcome:
    job = JobSpec(command=(script.name,), num_ranks=ranks, log_dir=str(log_dir), grace_s=2.0)
    return Supervisor(QuietConsole()).run(job)


def _shoot(page: Path, image: Path, height: int) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser to draw {image.name}: install one of {', '.join(BROWSERS)}")
    size = f"--window-size={WIDTH},{height}"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size]
    command = [browser, *options, f"--screenshot={image}", page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Run both programs and draw their reports."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.chdir(place)  # so that paths are shown as a user sees them
        script = place / "train.py"
        script.write_text(FAILING_JOB)
        outcome = _run(script, 4, Path("runs/a3f"))
        story = build_story(read_run(Path("runs/a3f")))
        environment = page_template("report.html.jinja").environment
        page = place / "failure.html"
        page.write_text(
            environment.from_string(FAILURE).render(picture=story.pictures[0], block=str(outcome))
        )
        _shoot(page, IMAGES / "failure.png", 480)
        script.write_text(LOOP)
        _run(script, 2, Path("runs/b41"))
        published = publish(Path("runs/b41"))
        _shoot(published.report, IMAGES / "report.png", 1000)


if __name__ == "__main__":
    main()
