"""Schedules, topology, costs and layouts as data, without torch and sockets."""
