"""A worker of TensorFlow's MultiWorkerMirroredStrategy, which prints the loss of each step."""

# mypy: ignore-errors

from __future__ import annotations

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf

from benchmarks.tasks.numpy_problem import LR, batch, weights

__all__ = ["main"]


def main(steps: int) -> None:
    """Train for some steps."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    size = strategy.num_replicas_in_sync
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    with strategy.scope():
        mean = tf.VariableAggregation.MEAN
        variables = [tf.Variable(value, aggregation=mean) for value in weights()]

    @tf.function
    def step(x, y):
        def replica(x, y):
            with tf.GradientTape() as tape:
                hidden = tf.tanh(x @ variables[0] + variables[1])
                loss = tf.reduce_mean((hidden @ variables[2] + variables[3] - y) ** 2)
            grads = tape.gradient(loss, variables)
            context = tf.distribute.get_replica_context()
            for variable, grad in zip(variables, grads):  # noqa: B905 - of TensorFlow's AutoGraph
                variable.assign_sub(LR * context.all_reduce(tf.distribute.ReduceOp.MEAN, grad))
            return loss

        return strategy.reduce(
            tf.distribute.ReduceOp.MEAN, strategy.run(replica, args=(x, y)), axis=None
        )

    for number in range(steps):
        x, y = batch(number)
        rows = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
        print("figure", float(step(tf.constant(x[rows]), tf.constant(y[rows]))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
