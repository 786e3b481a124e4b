"""Manifest of an Indexed Job for Kubernetes, with its service and its secret.

    Secret     32 random bytes, as a file of mode 0600 (384) that belongs to the container's root
    Service    headless, without a cluster IP: names such as train-0.train resolve to pods
    Job        pod i runs `braid run --node-rank i`; pod 0 shows the output and the error block

A pod that receives SIGTERM has the same time as any run to save. A failed pod fails the job, and
the job's other pods then end without a signal. With `min_ranks`, ranks of other pods continue
without a failed pod, and the job has succeeded when pod 0 has.

Source: the documentation of Kubernetes 1.32, "Indexed Job for Parallel Processing with Static Work
Assignment", "Job with Pod-to-Pod Communication", "Backoff limit per index" and "Success policy".
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass

from braid.errors import raise_all
from braid.runtime.option_types import Command, Module, Ranks, Text

__all__ = ["PORT", "SECRET_FILE", "KubernetesManifest"]

PORT = 29400
SECRET_FILE = "/var/run/braid/secret"  # noqa: S105 - a path
GRACE_S = 60
NAME = re.compile(r"[a-z](?:[a-z0-9-]{0,46}[a-z0-9])?")  # of a pod, a number is appended
QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:m|[kMGT]i?)?")
TEXT = """\
apiVersion: v1
kind: Secret
metadata:
  name: "{name}-secret"
data:
  secret: {secret}
---
apiVersion: v1
kind: Service
metadata:
  name: "{name}"
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: "{name}"
---
apiVersion: batch/v1
kind: Job
metadata:
  name: "{name}"
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
{failures}  template:
    spec:
      subdomain: "{name}"
      restartPolicy: Never
      terminationGracePeriodSeconds: {grace}
      containers:
        - name: braid
          image: {image}
          command: {command}
          env:
            - name: BRAID_NODE
              valueFrom:
                fieldRef:
                  fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            - name: BRAID_SECRET_FILE
              value: {secret_file}
{resources}\
          volumeMounts:
            - name: secret
              mountPath: {secret_file}
              subPath: secret
              readOnly: true
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: secret
          secret:
            secretName: "{name}-secret"
            defaultMode: 384
        - name: shared-memory
          emptyDir:
            medium: Memory
"""

ONE_FAILS_ALL = "  backoffLimit: 0\n"
FIRST_DECIDES = """\
  backoffLimitPerIndex: 0
  successPolicy:
    rules:
      - succeededIndexes: "0"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesManifest:
    """Manifest of a Kubernetes job that runs a script on several pods.

    Attributes:
        command: Script and its arguments: everything after SCRIPT belongs to it.
        image: Image of the container, which has braid and the script.
        name: Name of the job.
        nodes: Number of pods.
        ranks_per_node: Number of ranks of each pod.
        min_ranks: Continue while this many ranks live, with braid.elastic; 0 to end with the first
            one that dies.
        gpus: GPUs of each pod.
        cpus: Processors of each pod, such as 4.
        memory: Memory of each pod, such as 16Gi.
        is_module: SCRIPT is the name of a Python module.
    """

    command: Command = ()
    image: Text = ""
    name: str = "braid"
    nodes: int = 1
    ranks_per_node: Ranks = 1
    min_ranks: int = 0
    gpus: int = 0
    cpus: Text = ""
    memory: Text = ""
    is_module: Module = False

    def __post_init__(self) -> None:
        problems = []
        if NAME.fullmatch(self.name) is None:
            problems.append(
                "the name must have at most 48 lower-case letters, digits and dashes, got "
                f"{self.name!r}"
            )
        if not self.image or not self.command:
            problems.append("a container image or a script is missing: pass both")
        if self.nodes < 1 or self.ranks_per_node < 1 or self.gpus < 0:
            problems.append(
                "--nodes and the ranks of a node must be at least 1, and --gpus at least 0, got "
                f"{self.nodes}, {self.ranks_per_node} and {self.gpus}"
            )
        most = self.nodes * self.ranks_per_node
        if not 0 <= self.min_ranks <= most:
            problems.append(
                f"--min-ranks must be from 0 to the number of ranks, {most}, got {self.min_ranks}"
            )
        for what, quantity in (("processors", self.cpus), ("memory", self.memory)):
            if quantity and QUANTITY.fullmatch(quantity) is None:
                problems.append(f"{what} must be such as 4, 500m or 16Gi, got {quantity!r}")
        raise_all(problems)

    @property
    def words(self) -> list[str]:
        """Command of a pod; Kubernetes replaces $(BRAID_NODE) by its number."""
        # Kubernetes replaces $(NAME) in words, but for $$(NAME)
        command = [word.replace("$(", "$$(") for word in self.command]
        script = ["-m", *command] if self.is_module else command
        of_nodes = [
            *("--nnodes", str(self.nodes), "--node-rank", "$(BRAID_NODE)"),
            *("--rdzv", f"tcp://{self.name}-0.{self.name}:{PORT}"),
        ]
        limits = ["--min-ranks", str(self.min_ranks)] if self.min_ranks else []
        return ["braid", "run", *of_nodes, "-n", str(self.ranks_per_node), *limits, *script]

    def text(self, key: bytes) -> str:
        """Return the manifest as YAML.

        Args:
            key: Secret of the job, 32 random bytes.
        """
        limits = {"cpu": self.cpus, "memory": self.memory}
        limits |= {"nvidia.com/gpu": str(self.gpus) if self.gpus else ""}
        listed = "".join(
            f"              {name}: {json.dumps(value)}\n"
            for name, value in limits.items()
            if value
        )
        return TEXT.format(
            name=self.name,
            nodes=self.nodes,
            image=json.dumps(self.image),
            command=json.dumps(self.words),  # JSON is YAML
            secret=base64.b64encode(key).decode(),
            secret_file=SECRET_FILE,
            grace=GRACE_S,
            failures=FIRST_DECIDES if self.min_ranks else ONE_FAILS_ALL,
            resources=f"          resources:\n            limits:\n{listed}" if listed else "",
        )
