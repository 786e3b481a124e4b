"""A profile as a picture: the model's layers in a row, coloured by their time.

0  _Embed             |=|                               red: over two thirds of the slowest layer
1  TransformerBlock   |== forward ==|== inputs ==|=|    yellow, green: less
"""

from __future__ import annotations

from braid.plan.profiling.profile import Profile
from braid.programs.schedule.bars import Bar, draw
from braid.runtime.text import seconds_text

__all__ = ["HEAT", "profile_picture"]

HEAT = ((0.66, "red"), (0.33, "yellow"), (0.0, "green"))  # share of the slowest layer's time
COLOURS = {"red": "#cc3311", "yellow": "#ccbb44", "green": "#228833"}


def profile_picture(profile: Profile, rows: int) -> str:
    """Draw the layers of a profile as SVG, for a micro-batch of some rows."""
    times = [
        {
            "forward": layer.forward_s.of(rows),
            "backward to inputs": layer.input_grad_s.of(rows),
            "backward to weights": layer.weight_grad_s.of(rows),
        }
        for layer in profile.layers
    ]
    totals = [sum(parts.values()) for parts in times]
    slowest = max(totals, default=0.0) or 1.0
    bars = []
    for lane, (layer, parts) in enumerate(zip(profile.layers, times, strict=True)):
        colour = next(name for share, name in HEAT if totals[lane] >= share * slowest)
        start_s = 0.0
        for part, seconds in parts.items():
            title = f"{layer.name} ({layer.kind}): {part} {seconds_text(seconds)}"
            bars.append(Bar(lane, start_s, start_s + seconds, COLOURS[colour], title))
            start_s += seconds
    notes = [
        f"{seconds_text(total)}, keeps {layer.saved_bytes.of(rows) / 1e6:.2f} MB, hands on "
        f"{layer.output_bytes.of(rows) / 1e6:.2f} MB, parameters {layer.param_bytes / 1e6:.2f} MB"
        for layer, total in zip(profile.layers, totals, strict=True)
    ]
    return draw(
        [f"{layer.name}  {layer.kind}" for layer in profile.layers],
        bars,
        slowest,
        caption=f"{profile.model} on {profile.device}: {rows} rows, forward and backward",
        notes=notes,
    )
