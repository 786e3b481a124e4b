"""DistributedDataParallel and DistributedOptimizer, with what they check and warn of."""
