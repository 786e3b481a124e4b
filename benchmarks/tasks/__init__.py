"""Programs for the tasks of a cluster, one process each."""
