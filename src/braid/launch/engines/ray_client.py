"""The client of Ray: a placement group with a bundle for each node, and in each an actor.

    braid run ── ray_client ──> placement group ── actor of node 0 ──> agent ──> ranks 0, 1
                                                └─ actor of node 1 ──> agent ──> ranks 2, 3

Ray reserves resources, starts an agent on each node, reports why a node was lost, and ends the
remaining processes. Ranks communicate as under `braid run`; none of their data passes through Ray.
The agent dies with its actor, and the actor with this client (Ray ends an actor with its owner).

Words: --address, --strategy pack|spread, --resources CPU=1,GPU=1 (of each rank), --payload FILE.

Source: Ray's documentation of placement groups, actors and fault tolerance (Ray 2.60).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from braid.errors import ConfigError
from braid.launch.engines.client_words import ClientWords, FromClient, run_client
from braid.launch.engines.invitation import Invitation
from braid.launch.engines.ray_nodes import STRATEGIES, RayNode, place

__all__ = ["main", "run_agent"]

Ended = tuple[int, str, dict[int, bytes]]
PR_SET_PDEATHSIG = 1
TAIL = 2000  # characters of what an agent has printed
PROBE_LIMIT_S = 5.0
POLL_S = 0.5
DRAIN_POLL_S = 2.0


class Reserved(NamedTuple):
    """Resources that the client has reserved in a Ray cluster.

    Attributes:
        group: Placement group.
        bundles: Resources on each node.
        actors: Actors that use them.
    """

    group: Any
    bundles: list[dict[str, float]]
    actors: list[Any]


def run_agent(line: bytes, payload: bytes) -> Ended:
    """Run an agent, which starts ranks, to its end; the only method of an actor of Ray.

    This function is pickled by value, so it also runs on a node without braid. The agent's output
    then shows the missing package.

    Args:
        line: Invitation of this node.
        payload: Function that ranks call, with its arguments; empty for a script.

    Returns:
        Exit code of the agent, the end of its output, and the results of ranks.
    """

    def as_child() -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # dies with this actor
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which Ray blocks

    # a worker that waits here would outlive its raylet, and this node's agent with it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    environ = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}  # Ray's own
    with tempfile.TemporaryDirectory(prefix="braid-ray-") as directory:
        if payload:
            Path(directory, "call").write_bytes(payload)
            environ["BRAID_RAY_CALL"] = directory
        agent = subprocess.Popen(
            [sys.executable, "-m", "braid.launch.engines.joined_agent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environ,
            # Ray sends SIGTERM to the group of a dead actor; the agent must not stop the run for it
            start_new_session=True,
            preexec_fn=as_child,  # noqa: PLW1509 - nothing of it takes a lock
        )
        printed = _output_of(agent, line).decode(errors="replace")
        results = {int(p.suffix[1:]): p.read_bytes() for p in Path(directory).glob("result.*")}
    return agent.returncode, printed[-TAIL:], results


def _output_of(agent: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Return the output of an agent after its end; ask it to end if Ray takes the node away."""
    words: bytes | None = line
    is_asked = False
    while True:
        try:
            return agent.communicate(words, DRAIN_POLL_S)[1]
        except subprocess.TimeoutExpired:
            words = None  # has been sent
            if not is_asked and _is_draining():
                is_asked = True
                agent.terminate()  # its ranks leave an elastic run, and save in another one


def _is_draining() -> bool:
    """Return whether Ray takes this node away soon, such as before a preemption."""
    import ray  # noqa: PLC0415 - an extra

    try:
        nodes = ray._private.state.state.get_draining_nodes()  # noqa: SLF001 - nothing public
        return ray.get_runtime_context().get_node_id() in nodes
    except Exception:  # noqa: BLE001 - of another Ray, or while its server starts again
        return False


class AgentActor:
    """An actor that runs an agent, so that Ray ends it with the job."""

    def run(self, line: bytes, payload: bytes) -> Ended:
        """Run braid's agent on this node until its ranks have ended; see `run_agent`."""
        return run_agent(line, payload)


def main(words: Sequence[str]) -> int:
    """Allocate nodes, start agents, and wait for their end; return the exit code.

    `words` are the arguments of this program.
    """
    try:
        import ray  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as exc:
        msg = "--on ray needs Ray: pip install 'braid-train[ray]'"
        raise ConfigError(msg) from exc
    options = ClientWords.parse(words, {"address", "strategy", "resources", "payload"})
    strategy = options.get("strategy", "pack").lower()
    if strategy not in STRATEGIES:
        msg = f"--strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}"
        raise ConfigError(msg)
    demand = {"CPU": 1.0, **options.numbers("resources")}
    _connect(ray, options.get("address") or os.environ.get("RAY_ADDRESS") or "auto")
    chosen = place(_nodes(ray), options.num_ranks, demand, strategy)
    reserved = _reserve(ray, chosen, demand)
    try:
        FromClient(hosts=tuple((node.name, count) for node, count in chosen)).send()
        line = sys.stdin.buffer.readline()
        if not line:  # the launcher has given up
            return 0
        file = options.get("payload", "")
        payload = Path(file).read_bytes() if file else b""
        return _wait(ray, _start_actors(ray, reserved, line, payload), file)
    finally:
        ray.util.remove_placement_group(reserved.group)
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster, without waiting for one that is not there."""
    if address not in {"auto", "local"}:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            socket.create_connection((host, int(port)), PROBE_LIMIT_S).close()
        except (OSError, ValueError) as exc:
            msg = f"no Ray cluster answers at {address}: {exc}. Check RAY_ADDRESS, or --address"
            raise ConfigError(msg) from exc
    try:
        ray.init(address=address, namespace="braid", log_to_driver=False, logging_level="ERROR")
    except ConnectionError as exc:
        msg = "no Ray cluster runs here: start one with `ray start --head`, or give --address"
        raise ConfigError(msg) from exc
    except RuntimeError as exc:  # other versions of Ray or Python
        msg = f"this Ray cannot join the cluster: {' '.join(str(exc).split())}"
        raise ConfigError(msg) from exc


def _nodes(ray: Any) -> list[RayNode]:
    """Return the living nodes, with their free resources."""
    free = ray._private.state.available_resources_per_node()  # noqa: SLF001 - nothing public
    alive = [node for node in ray.nodes() if node["Alive"]]
    names = [node["NodeManagerHostname"] for node in alive]
    return [
        RayNode(
            node["NodeID"],
            name if names.count(name) == 1 else f"{name}-{node['NodeID'][:4]}",
            free.get(node["NodeID"], {}),
        )
        for node, name in zip(alive, names, strict=True)
    ]


def _reserve(
    ray: Any, chosen: Sequence[tuple[RayNode, int]], resources: Mapping[str, float]
) -> Reserved:
    """Return a placement group with a bundle on each chosen node, once it is there."""
    bundles = [{name: count * want for name, want in resources.items()} for _, count in chosen]
    labels = [{"ray.io/node-id": node.key} for node, _ in chosen]
    group = ray.util.placement_group(bundles, strategy="PACK", bundle_label_selector=labels)
    is_announced = False
    while not group.wait(POLL_S):  # others may have been faster; the launcher limits the time
        state = ray.util.placement_group_table(group)["stats"]["scheduling_state"]
        if not is_announced:
            print(f"Ray answers {state}: others use what was free", file=sys.stderr, flush=True)
            is_announced = True
        # the launcher sends nothing before it has the hosts: readable stdin has been closed
        if select.select([sys.stdin], [], [], 0.0)[0]:
            ray.util.remove_placement_group(group)
            sys.exit(0)
    return Reserved(group, bundles, [])


def _start_actors(ray: Any, reserved: Reserved, line: bytes, payload: bytes) -> dict[Any, int]:
    """Start an actor in each bundle; return the futures of their ends, with numbers of nodes."""
    invitation = Invitation.from_line(line)
    made = ray.remote(AgentActor)
    ends = {}
    for number, bundle in enumerate(reserved.bundles):
        custom = {name: want for name, want in bundle.items() if name not in {"CPU", "GPU"}}
        in_bundle = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            reserved.group, placement_group_bundle_index=number
        )
        actor = made.options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            resources=custom,
            scheduling_strategy=in_bundle,
        ).remote()
        reserved.actors.append(actor)  # Ray ends actors without a reference
        own_line = invitation.for_node(number).to_line()
        ends[actor.run.remote(own_line, payload)] = number
    return ends


def _wait(ray: Any, ends: dict[Any, int], results_in: str) -> int:
    """Wait until all agents have ended; report why nodes were lost."""
    code = 0
    while ends:
        ended, _ = ray.wait(list(ends), num_returns=1)
        number = ends.pop(ended[0])
        try:
            status, printed, results = ray.get(ended[0])
        except ray.exceptions.RayError as exc:
            FromClient(lost=number, why=_why(exc)).send()
            code = 1
            continue
        for rank, result in results.items():
            Path(f"{results_in}.{rank}").write_bytes(result)
        if status:
            last = printed.strip().splitlines()[-1:] or ["it printed nothing"]
            FromClient(lost=number, why=f"ended with exit code {status}: {last[0]}").send()
            print(printed, file=sys.stderr, flush=True)
            code = 1
    return code


def _why(exc: Exception) -> str:
    """Return Ray's reason for the end of an actor as a clause, without its list of guesses."""
    text = " ".join(str(exc).split())
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in text:
            text = text.partition(mark)[2]
            break
    text = text.partition("Some common causes")[0].strip().rstrip(".")
    return f"lost its Ray actor: {text[:300]}"


if __name__ == "__main__":
    sys.exit(run_client("ray", main))
