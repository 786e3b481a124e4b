"""The result of `parallelize`: the kind of each layer, and the explanation of what is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from braid.tensor_parallel.insertion.explain import table, to_svg
from braid.tensor_parallel.insertion.records import Row

__all__ = ["Division"]


class Division(dict[str, str]):
    """Kind of each module that is divided, by name.

    Attributes:
        rows: Values that are split, and collectives; empty if the model is divided by modules.
        whole: Why layers stay whole, by the pattern of their names.
    """

    def __init__(
        self,
        kinds: Mapping[str, str],
        rows: Sequence[Row] = (),
        whole: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(kinds)
        self.rows = list(rows)
        self.whole = dict(whole or {})

    def explain(self) -> str:
        """Return the values, their layouts, and what is sent, with bytes and costs, as a table."""
        if not self.rows:
            lines = [f"{name}  {kind}" for name, kind in self.items()]
            return "\n".join([*lines, "pass inputs= to see what is sent"])
        reasons = [f"whole: {name}: {why}" for name, why in self.whole.items()]
        return "\n".join([table(self.rows), *reasons])

    def to_svg(self) -> str:
        """Return the picture of the same: a line for each value, coloured by its layout."""
        return to_svg(self.rows)
