"""Engines that carry out collectives: in shared memory, or through a process group of torch."""
