"""The client of Ray: a placement group with a bundle for each node, and in each an actor.

    braid run ── ray_client ──> placement group ── actor of node 0 ──> agent ──> ranks 0, 1
                                                └─ actor of node 1 ──> agent ──> ranks 2, 3

Ray reserves resources, starts an agent on each node, reports why a node was lost, and ends the
remaining processes. Ranks communicate as under `braid run`; none of their data passes through Ray.
The agent dies with its actor, and the actor with this client (Ray ends an actor with its owner).

Words: --address, --strategy pack|spread, --resources CPU=1,GPU=1 (of each rank), --payload FILE,
--max-ranks (of a run that may grow).

Source: Ray's documentation of placement groups, actors and fault tolerance (Ray 2.60).
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from braid.errors import ConfigError
from braid.launch.engines.client_words import ClientWords, run_client
from braid.launch.engines.ray_agents import RayAgents
from braid.launch.engines.ray_nodes import STRATEGIES, free_nodes, place

__all__ = ["main", "run_agent"]

Ended = tuple[int, str, dict[int, bytes]]
PR_SET_PDEATHSIG = 1
TAIL = 2000  # characters of what an agent has printed
PROBE_LIMIT_S = 5.0
DRAIN_POLL_S = 2.0


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
    options = ClientWords.parse(words, {"address", "max-ranks", "strategy", "resources", "payload"})
    strategy = options.get("strategy", "pack").lower()
    if strategy not in STRATEGIES:
        msg = f"--strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}"
        raise ConfigError(msg)
    demand = {"CPU": 1.0, **options.numbers("resources")}
    _connect(ray, options.get("address") or os.environ.get("RAY_ADDRESS") or "auto")
    max_ranks = int(options.get("max-ranks", "0"))
    chosen = place(free_nodes(ray), options.num_ranks, demand, strategy, max_ranks)
    payload = options.get("payload", "")
    agents = RayAgents(ray, ray.remote(AgentActor), demand, strategy, max_ranks, payload)
    try:
        agents.reserve(chosen)
        return agents.run(io.FileIO(0, closefd=False))  # without a buffer, so that `select` works
    finally:
        agents.close()
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


if __name__ == "__main__":
    sys.exit(run_client("ray", main))
