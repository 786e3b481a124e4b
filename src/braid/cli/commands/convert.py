"""`braid convert`: write a model as readable source code of pipeline stages."""

from __future__ import annotations

from braid.runtime.option_types import Target

__all__ = ["convert"]


def convert(
    model: Target,
    *,
    out: str,
    stages: int = 2,
    schedule: str = "1f1b",
    microbatches: int = 4,
) -> int:
    """Write a model as stages, one Python file each, and configurations that train them.

    FUNCTION returns the model and its example arguments: a tuple, or a dict of keyword arguments.
    The stages call the model's own modules, and are checked against it, bit by bit.

    Args:
        model: Module and function.
        out: Directory of the files.
        stages: Number of stages.
        schedule: Schedule of the pipelines in the configurations.
        microbatches: Micro-batches of a batch in the configurations.
    """
    import sys
    from pathlib import Path

    from braid.parallel.graph.conversion import convert as write
    from braid.parallel.graph.conversion import load_model

    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current directory, as for `python -m`
    conversion = write(
        load_model(model), stages, Path(out), schedule=schedule, num_microbatches=microbatches
    )
    ends = [*conversion.cuts[1:], len(conversion.graph.nodes)]
    for number, (begin, end) in enumerate(zip(conversion.cuts, ends, strict=True)):
        nodes = conversion.graph.nodes[begin:end]
        modules = [node.name for node in nodes if node.kind == "module"]
        size = sum(
            p.numel()
            for p in {p for name in modules for p in conversion.graph.modules[name].parameters()}
        )
        print(
            f"{out}/stage{number}.py: {modules[0]} to {modules[-1]}, {len(nodes)} calls, "
            f"{size:,} parameters"
        )
    print(f"{out}/README.md: how to train them; the stages return the same bits as the model")
    return 0
