"""How a group carries out a collective: in shared memory, or through a process group of torch."""
