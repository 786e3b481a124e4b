"""The command and the environment of a manifest's pods, on namespaces: pods find each other by their service's names."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from netlab import Lab, done

from braid.launch.engines.kubernetes import SECRET_FILE, KubernetesManifest

JOBS = str(Path(__file__).with_name("host_jobs.py"))
ETC = Path(
    "/etc/netns"
)  # `ip netns exec` shows the files of a namespace's directory there as those of /etc


@contextmanager
def names(lab: Lab, hosts: str) -> Iterator[None]:
    """What the service's names lead to, in every namespace."""
    places = [ETC / f"{lab.prefix}{host}" for host in hosts]
    lines = [f"10.77.0.{i + 1} train-{i}.train" for i in range(len(hosts))]
    try:
        for place in places:
            place.mkdir(parents=True)
            (place / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        yield
    finally:
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def test_pods_of_a_manifest_find_each_other(lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hosts = lab(2)
    manifest = KubernetesManifest(
        name="train", image="any", command=(JOBS, "meet"), nodes=2, ranks_per_node=2
    )
    secret, _, job = yaml.safe_load_all(manifest.text(os.urandom(32)))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = container["command"]
    assert command[:2] == ["braid", "run"]
    key = tmp_path / "secret"
    key.touch(mode=0o600)
    key.write_bytes(base64.b64decode(secret["data"]["secret"]))
    assert {"name": "BRAID_SECRET_FILE", "value": SECRET_FILE} in container["env"]
    with names(hosts, "ab"):
        pods = [
            hosts.braid(
                host,
                *(word.replace("$(BRAID_NODE)", str(node)) for word in command[2:]),
                cwd=tmp_path,
                BRAID_SECRET_FILE=str(key),
            )
            for node, host in enumerate("ab")
        ]
        ended = [done(pod) for pod in pods]
    assert [pod.code for pod in ended] == [0, 0], ended
    said = "all 10.77.0.1 10.77.0.1 10.77.0.2 10.77.0.2"
    assert sorted(ended[0].out.splitlines()) == [f"[rank {rank}] {said}" for rank in range(4)]
