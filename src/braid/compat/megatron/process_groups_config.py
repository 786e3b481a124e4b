"""`megatron.core.process_groups_config`: the groups of a model, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from braid.compat.megatron.failure import UsageError
from braid.compat.megatron.state import STATE

__all__ = ["ProcessGroupCollection"]

KINDS = {  # name -> kind of group in parallel_state
    **{
        name: name
        for name in ("tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "ep", "tp_ep", "dp")
    },
    "tp_ep_pp": "tp_ep_pp",
    "dp_cp": "dp_cp",
    "intra_dp_cp": "intra_dp_cp",
    "expt_tp": "ep_tp",
    "expt_dp": "ep_dp",
    "intra_expt_dp": "intra_ep_dp",
}


class ProcessGroupCollection:
    """Process groups by name, such as `tp`, `pp` and `dp_cp`.

    Args:
        groups: Group of each name; None for a group without this rank.

    Raises:
        UsageError: A name is unknown.
    """

    def __init__(self, **groups: Any) -> None:
        if unknown := sorted(set(groups) - set(KINDS)):
            msg = f"unknown groups {', '.join(unknown)}: pass some of {', '.join(KINDS)}"
            raise UsageError(msg)
        self.__dict__.update(groups)

    def __getattr__(self, name: str) -> Any:
        msg = f"pg_collection must have a {name}: set it, or call use_mpu_process_groups()"
        raise AttributeError(msg)

    def __repr__(self) -> str:
        return f"ProcessGroupCollection({', '.join(self.__dict__)})"

    @classmethod
    def use_mpu_process_groups(
        cls, required_pgs: Sequence[str] | None = None
    ) -> ProcessGroupCollection:
        """Return groups of `parallel_state`; all groups when `required_pgs` is None."""
        STATE.require("tp")
        names = list(KINDS) if required_pgs is None else required_pgs
        if unknown := sorted(set(names) - set(KINDS)):
            msg = f"unknown groups {', '.join(unknown)}: pass some of {', '.join(KINDS)}"
            raise UsageError(msg)
        return cls(**{name: STATE.group(KINDS[name], check_initialized=False) for name in names})
