"""Joins a Ray cluster, or starts a temporary one on this machine."""

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
from blendserve.errors import BlendserveError, ClusterUnavailable, ConfigError
from blendserve.extras import install_hint
from blendserve.registry import STORES

OBJECT_STORE_BYTES = 100_000_000  # of a local cluster: it carries token ids and text deltas
CONNECT_S = 5.0
LOCAL_ENV = {  # of a cluster on this machine alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # despite its name: a single machine, bound to the loopback address
    "RAY_worker_niceness": "0",  # the default lets other processes run before the workers
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # the default writes to this process's terminal
}
# Without it, a call of one of Ray's threads after shutdown would start another cluster.
NO_AUTO_CONNECT = ("RAY_ENABLE_AUTO_CONNECT", "0")


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """The resources of each worker."""

    cpus: int
    gpus: int  # 1 if the cluster has one for each


@contextmanager
def cluster(address: str | None, workers: int) -> Iterator[WorkerResources]:
    """Join the Ray cluster at `address` or RAY_ADDRESS, or start a local one -> the resources of each worker.

    A local cluster listens on the loopback address alone, sends no usage statistics, and ends with this block. Raises
    ConfigError if Ray is not installed; ClusterUnavailable if no cluster answers at the address, if it runs another
    version of Ray or Python, or if it has no free CPU for a worker.
    """
    given = address or os.environ.get("RAY_ADDRESS")
    given = None if given == "local" else given
    os.environ.setdefault(*NO_AUTO_CONNECT)
    if given:
        check_address(given)
    else:
        _configure_ray_env()
    ray = import_ray()
    options: dict[str, Any] = {}
    scratch = ""
    if not given:
        scratch = tempfile.mkdtemp(prefix="bs-")  # short, as a part of socket paths
        n_cpus = max(workers, os.cpu_count() or 1)
        options = {"num_cpus": n_cpus, "object_store_memory": OBJECT_STORE_BYTES}
        options |= {"include_dashboard": False, "_temp_dir": scratch}
    try:
        try:
            ray.init(given or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:  # Ray raises a plain Exception if a process of its own starts too slowly
            reason = " ".join(str(error).split())
            raise ClusterUnavailable(f"Ray cannot be used at {given or 'this machine'}: {reason}") from error
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        # A local cluster reports its free CPUs only after a moment.
        free = int(ray.available_resources().get("CPU", 0)) if given else sum(cpus)
        each = cpus_each(cpus, free, workers)
        if not each:
            raise ClusterUnavailable(
                f"{workers} workers need a CPU each, and the Ray cluster at {given} has {free} of {sum(cpus)} "
                f"free: ask for fewer, add a machine (ray start --address ...), or stop other programs there"
            )
        yield WorkerResources(each, int(ray.cluster_resources().get("GPU", 0) >= workers))
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


def check_address(address: str) -> None:
    """Raises ClusterUnavailable within seconds if nothing listens at HOST:PORT. Ray itself retries for minutes."""
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
    """Set variables that Ray reads on import, unless the user set them. Raises ConfigError if Ray is already imported."""
    missing = {name: value for name, value in LOCAL_ENV.items() if name not in os.environ}
    if missing and "ray" in sys.modules:
        words = " ".join(f"{name}={value}" for name, value in missing.items())
        raise ConfigError(
            f"Ray was imported before its environment could be set: set {words} in the environment"
        )
    os.environ.update(missing)


def import_ray() -> Any:
    """Import Ray, an extra. Raises ConfigError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"workers need Ray: {install_hint('ray')} ({error})") from None
    return ray


def unwrap_ray_error(error: BaseException, message: str) -> BlendserveError:
    """The error of this package that a Ray error carries, or ClusterUnavailable with the message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BlendserveError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    return ClusterUnavailable(message)


def bind_to_loopback() -> None:
    """Bind Ray Serve's port of a replica on a local cluster to the loopback address; call it before the port is opened.

    Ray Serve binds to all interfaces, and has no setting for it. A test checks the open ports.
    """
    if ipaddress.ip_address(import_ray().util.get_node_ip_address()).is_loopback:
        serve: Any = importlib.import_module("ray.serve._private.replica")
        bind = serve.add_port_to_grpc_server
        serve.add_port_to_grpc_server = lambda server, _: bind(server, "127.0.0.1:0")


def cpus_each(cpus: Sequence[int], free: int, workers: int) -> int:
    """The largest number of CPUs for each worker; 0 if there are too few. All CPUs of a worker are on one machine.

    cpus: of each machine. free: of all machines.
    """
    fits = (n for n in range(free // workers, 0, -1) if sum(has // n for has in cpus) >= workers)
    return next(fits, 0)


def worker_config(config: Config, folder: Path) -> Config:
    """An index's settings for workers, which have no index: a store in a folder gets an absolute path."""
    if not STORES.load(config.store.kind).needs_folder:
        return config
    return config.replace("store.location", str((config.store.path or folder / "kv").absolute()))
