"""A task of TensorFlow's coordinator: null closures per second; run by a Python with tensorflow."""

# mypy: ignore-errors

from __future__ import annotations

import json
import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf

__all__ = ["main"]


def main(closures: int, rounds: int) -> None:
    """Serve, or print the closures per second of each round."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in {"worker", "ps"}:
        tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
        ).join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def nothing() -> tf.Tensor:
        return tf.constant(0)

    for number in range(rounds + 1):
        begun = time.perf_counter()
        for _ in range(closures):
            coordinator.schedule(nothing)
        coordinator.join()
        if number:
            print("figure", closures / (time.perf_counter() - begun), flush=True)
    os._exit(0)


if __name__ == "__main__":
    json.loads(os.environ["TF_CONFIG"])
    main(*map(int, sys.argv[1:]))
