"""Ray's placement groups, which are there at once."""

from __future__ import annotations

from . import scheduling_strategies

__all__ = [
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
    "scheduling_strategies",
]
GROUPS: list[_Group] = []


class _Group:
    def __init__(self, bundles: list[dict[str, float]], labels: list[dict[str, str]]) -> None:
        self.bundles, self.labels = bundles, labels

    def wait(self, timeout_s: float) -> bool:
        return timeout_s > 0


def placement_group(
    bundles: list[dict[str, float]], strategy: str, bundle_label_selector: list[dict[str, str]]
) -> _Group:
    """Reserve resources."""
    assert strategy
    GROUPS.append(_Group(bundles, bundle_label_selector))
    return GROUPS[-1]


def placement_group_table(group: _Group) -> dict[str, object]:
    """Return the state of a group."""
    assert group in GROUPS
    return {"state": "CREATED", "stats": {"scheduling_state": "CREATED"}}


def remove_placement_group(group: _Group) -> None:
    """Give resources back."""
    GROUPS.remove(group)
