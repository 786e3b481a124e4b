"""Engines that run collectives: in shared memory, or through a process group of torch."""
