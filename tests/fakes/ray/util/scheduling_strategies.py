"""Where an actor runs."""


class PlacementGroupSchedulingStrategy:
    """In a bundle of a group."""

    def __init__(self, group: object, placement_group_bundle_index: int) -> None:
        self.group, self.index = group, placement_group_bundle_index
