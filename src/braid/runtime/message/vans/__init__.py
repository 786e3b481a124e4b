"""Vans over sockets, pipes and queues of one process."""
