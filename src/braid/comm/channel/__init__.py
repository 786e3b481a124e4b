"""Control lines, slots and windows: the memory through which the ranks of a group coordinate."""
