"""DistributedDataParallel and AveragingOptimizer, with their checks and warnings."""
