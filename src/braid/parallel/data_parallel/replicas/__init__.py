"""DataParallel: replicas of a module on several devices of one process."""
