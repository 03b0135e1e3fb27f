"""One small Ray cluster for all tests, and a second node for tests that kill one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from blendserve.ray.cluster import WorkerResources, cluster
from tests.ray.engines import SECOND_NODE
from tests.support.waiting import eventually

# A dead node refuses a connection and is known to be dead in a second; one that stalls has ten, five times.
NODE_DEATH = {"RAY_health_check_period_ms": "200", "RAY_health_check_initial_delay_ms": "200"}

# The command `ray`, which would take the machine's address for 127.0.0.1, where the first node does not listen.
RAY_ON_LOOPBACK = (
    "from ray._private import services\nservices.resolve_ip_for_localhost = str\n"
    "from ray.scripts.scripts import main\nmain()"
)


@pytest.fixture(scope="session")
def share() -> Iterator[WorkerResources]:
    """Of each of two workers."""
    if importlib.util.find_spec("ray") is None:  # an import here would come before the cluster's settings
        pytest.skip("Ray is not installed: pip install 'blendserve[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NODE_DEATH.items():
            patch.setenv(name, value)
        with cluster(None, 2) as each:
            yield each


@pytest.fixture
def second_node(share: WorkerResources) -> Iterator[None]:
    """Another node of one CPU, joined as users are told to; processes on it have SECOND_NODE in their environment."""
    import ray

    here = os.environ | {SECOND_NODE: "1", "RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    where = ["--address", ray.get_runtime_context().gcs_address, "--node-ip-address", "127.0.0.1"]
    options = [*where, "--num-cpus", "1", "--object-store-memory", "80000000", "--block"]
    command = [sys.executable, "-c", RAY_ON_LOOPBACK, "start", *options]
    before = alive()
    with subprocess.Popen(command, env=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as node:
        eventually(lambda: node.poll() is not None or alive() != before)
        assert node.poll() is None, "the second node ended"
        yield
        node.terminate()


def alive() -> set[str]:
    """Nodes of the cluster."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
