"""Control lines, slots and windows: the shared memory that the ranks of a group use to coordinate.

Control lines hold counters, slots hold staged data, and windows hold data of longer operations.
"""
