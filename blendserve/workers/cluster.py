"""A Ray cluster to work on: one that is there, or one of this machine's own for as long as it is needed."""

from __future__ import annotations

import importlib
import ipaddress
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendserve.config import Config, changed
from blendserve.errors import ClusterUnavailable, ConfigError

OBJECT_STORE_BYTES = (
    100_000_000  # of a cluster of our own: what goes through it is token ids and pieces of answers
)
OWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # in spite of its name: one machine alone, bound to the loopback address
    "RAY_worker_niceness": "0",  # or whatever else runs on the machine goes before its workers
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # or its processes write to this one's terminal
}


@dataclass(frozen=True, slots=True)
class Share:
    """What each of some workers may have of a cluster."""

    cpus: int
    gpus: int  # 1 where there is one for each


@contextmanager
def cluster(address: str | None, workers: int) -> Iterator[Share]:
    """Join the Ray cluster at `address`, or at RAY_ADDRESS, or start one -> what each of the workers may have of it.

    One of our own listens on the loopback address alone and sends no statistics to anybody; it ends with this.
    Raises ConfigError where Ray is not installed, ClusterUnavailable where there is no cluster at the address.
    """
    there = address or os.environ.get("RAY_ADDRESS")
    if not there:
        _settle()
    ray = import_ray()
    scratch = None if there else tempfile.mkdtemp(prefix="bs-")  # short: it becomes part of sockets' names
    own: dict[str, Any] = {
        "num_cpus": max(workers, os.cpu_count() or 1),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": scratch,
    }
    try:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(there or "local", **quiet, **({} if there else own))
        yield _share(ray.nodes(), workers)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if ray.is_initialized():
            raise  # of what was done there
        raise ClusterUnavailable(
            f"no Ray cluster can be had at {there or 'this machine'}: {error}"
        ) from error
    finally:
        ray.shutdown()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def _settle() -> None:
    """What Ray reads when it is imported. What the user has set stays. Raises ConfigError where it has been read."""
    missing = {name: value for name, value in OWN.items() if name not in os.environ}
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
        raise ConfigError(f"workers need Ray: pip install 'blendserve[ray]' ({error})") from None
    return ray


def stay_on_loopback() -> None:
    """In a replica on a cluster of our own, before Ray Serve opens its port: it would bind to all interfaces.

    Ray has no setting for it; a test looks at the ports that are open.
    """
    ray = import_ray()
    if ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        serve: Any = importlib.import_module("ray.serve._private.replica")
        bind = serve.add_port_to_grpc_server
        serve.add_port_to_grpc_server = lambda server, _: bind(server, "127.0.0.1:0")


def _share(nodes: list[dict[str, Any]], workers: int) -> Share:
    """Of each worker, where they are spread over the nodes that live."""
    there = [node["Resources"] for node in nodes if node["Alive"]]
    smallest = min((int(n["CPU"]) for n in there if n.get("CPU")), default=1)
    each = max(1, smallest // math.ceil(workers / max(1, len(there))))
    return Share(each, int(sum(n.get("GPU", 0) for n in there) >= workers))


def worker_config(config: Config, folder: Path) -> Config:
    """An index's settings for an engine without the index: its store by a path that holds in any working folder."""
    path = (config.store.path or folder / "kv").absolute()
    return changed(config, store={**config.store.model_dump(), "path": path})
