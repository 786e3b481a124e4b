"""Programs that are started as the tasks of a cluster, each in a process of its own."""
