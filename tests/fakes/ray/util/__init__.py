"""Ray's placement groups, which are there at once."""

from __future__ import annotations

from . import scheduling_strategies

__all__ = [
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
    "scheduling_strategies",
]


class _Group:
    def wait(self, timeout_s: float) -> bool:
        return timeout_s > 0


def placement_group(
    bundles: list[dict[str, float]], strategy: str, bundle_label_selector: object
) -> _Group:
    """Reserve resources."""
    assert bundles
    assert strategy
    assert bundle_label_selector
    return _Group()


def placement_group_table(group: _Group) -> dict[str, dict[str, str]]:
    """Return the state of a group."""
    del group
    return {"stats": {"scheduling_state": "CREATED"}}


def remove_placement_group(group: _Group) -> None:
    """Give resources back."""
