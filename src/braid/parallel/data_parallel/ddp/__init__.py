"""DistributedDataParallel and DistributedOptimizer, with their checks and warnings."""
