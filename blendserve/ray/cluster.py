"""The Ray cluster that workers run on: a given one, or one on this machine for as long as it is needed."""

from __future__ import annotations

import importlib
import ipaddress
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendserve.config import Config
from blendserve.errors import ClusterUnavailable, ConfigError
from blendserve.extras import install_hint
from blendserve.registry import STORES

OBJECT_STORE_BYTES = 100_000_000  # of a local cluster: token ids and pieces of answers go through it
CONNECT_S = 5.0
LOCAL_ENV = {  # of a cluster on this machine alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # in spite of its name: one machine alone, bound to the loopback address
    "RAY_worker_niceness": "0",  # or whatever else runs on the machine goes before its workers
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # or its processes write to this one's terminal
}
# Ray's own threads would start another cluster where they ask for something after this one has ended.
NO_AUTO_CONNECT = ("RAY_ENABLE_AUTO_CONNECT", "0")


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """What each worker gets of a cluster."""

    cpus: int
    gpus: int  # 1 where there is one for each


@contextmanager
def cluster(address: str | None, workers: int) -> Iterator[WorkerResources]:
    """Join the Ray cluster at `address` or RAY_ADDRESS, or start a local one -> the resources of each worker.

    A local cluster listens on the loopback address alone, sends no usage statistics, and ends with this block. Raises
    ConfigError where Ray is not installed; ClusterUnavailable where no cluster answers at the address, where it runs
    another version of Ray or Python, and where it has no free CPU for each worker.
    """
    there = address or os.environ.get("RAY_ADDRESS")
    there = None if there == "local" else there
    os.environ.setdefault(*NO_AUTO_CONNECT)
    if not there:
        _configure_ray_env()
    ray = import_ray()
    if there:
        check_address(there)
    scratch = None if there else tempfile.mkdtemp(prefix="bs-")  # short: it becomes part of sockets' names
    own: dict[str, Any] = {
        "num_cpus": max(workers, os.cpu_count() or 1),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": scratch,
    }
    try:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        try:
            ray.init(there or "local", **quiet, **({} if there else own))
        except (
            Exception
        ) as error:  # Ray raises plain Exception where one of its processes does not start in time
            where = there or "this machine"
            raise ClusterUnavailable(
                f"Ray cannot be used at {where}: {' '.join(str(error).split())}"
            ) from error
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        # A local cluster reports its free CPUs only after a moment.
        free = int(ray.available_resources().get("CPU", 0)) if there else sum(cpus)
        each = cpus_each(cpus, free, workers)
        if not each:
            raise ClusterUnavailable(
                f"{workers} workers need a CPU each, and of the {sum(cpus)} of the Ray cluster at {there} {free} are "
                f"free: ask for fewer, add a machine (ray start --address ...), or end what else runs there"
            )
        yield WorkerResources(each, int(ray.cluster_resources().get("GPU", 0) >= workers))
    finally:
        ray.shutdown()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def check_address(address: str) -> None:
    """Raise ClusterUnavailable in seconds where nothing listens at HOST:PORT. Ray itself tries for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ClusterUnavailable(f"{address!r} is not the address of a Ray cluster: give auto or HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ClusterUnavailable(
            f"no Ray cluster answers at {address} ({error}): start one there by ray start --head, or leave --ray and "
            "RAY_ADDRESS out to start one on this machine"
        ) from None


def _configure_ray_env() -> None:
    """Set what Ray reads when it is imported; what the user has set stays. Raises ConfigError where it is imported."""
    missing = {name: value for name, value in LOCAL_ENV.items() if name not in os.environ}
    if missing and "ray" in sys.modules:
        words = " ".join(f"{name}={value}" for name, value in missing.items())
        raise ConfigError(
            f"Ray was imported before it could be kept on this machine: set {words} in the environment"
        )
    os.environ.update(missing)


def import_ray() -> Any:
    """Ray, which is an extra. Raises ConfigError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"workers need Ray: {install_hint('ray')} ({error})") from None
    return ray


def bind_to_loopback() -> None:
    """In a replica on a cluster of our own, before Ray Serve opens its port: it would bind to all interfaces.

    Ray has no setting for it; a test looks at the ports that are open.
    """
    ray = import_ray()
    if ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        serve: Any = importlib.import_module("ray.serve._private.replica")
        bind = serve.add_port_to_grpc_server
        serve.add_port_to_grpc_server = lambda server, _: bind(server, "127.0.0.1:0")


def cpus_each(cpus: Sequence[int], free: int, workers: int) -> int:
    """The most that each of the workers can have, of machines with so many CPUs and so many free in all; 0 for too few.

    A worker's CPUs are on one machine.
    """
    fits = (n for n in range(free // workers, 0, -1) if sum(has // n for has in cpus) >= workers)
    return next(fits, 0)


def can_fit_worker(resources: WorkerResources) -> bool:
    """Whether any machine of the connected cluster is large enough for one worker, however much of it is in use."""
    need = {"CPU": resources.cpus, "GPU": resources.gpus}
    alive = (node["Resources"] for node in import_ray().nodes() if node["Alive"])
    return any(all(has.get(kind, 0) >= n for kind, n in need.items()) for has in alive)


def worker_config(config: Config, folder: Path) -> Config:
    """An index's settings for an engine without the index: its store by a path that holds in any working folder."""
    if not STORES.load(config.store.kind).needs_folder:
        return config
    return config.replace("store.location", str((config.store.path or folder / "kv").absolute()))
