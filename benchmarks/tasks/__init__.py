"""Programs that are started as the tasks of a cluster, one process each."""
