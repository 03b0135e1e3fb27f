"""A Ray cluster to work on: one that is there, or one of this machine's own for as long as it is needed."""

from __future__ import annotations

import importlib
import ipaddress
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blendserve.config import Config, changed
from blendserve.errors import ClusterUnavailable, ConfigError
from blendserve.extras import install_hint

OBJECT_STORE_BYTES = (
    100_000_000  # of a cluster of our own: what goes through it is token ids and pieces of answers
)
ANSWER_S = 10.0  # for which the head of a cluster that is joined is waited for
OWN = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # in spite of its name: one machine alone, bound to the loopback address
    "RAY_worker_niceness": "0",  # or whatever else runs on the machine goes before its workers
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # or its processes write to this one's terminal
}
# Otherwise Ray's own threads, where they still ask for something when a cluster has ended, start another one.
NO_OTHER = ("RAY_ENABLE_AUTO_CONNECT", "0")


@dataclass(frozen=True, slots=True)
class Share:
    """What each of some workers may have of a cluster."""

    cpus: int
    gpus: int  # 1 where there is one for each


@contextmanager
def cluster(address: str | None, workers: int) -> Iterator[Share]:
    """Join the Ray cluster at `address`, or at RAY_ADDRESS, or start one -> what each of the workers may have of it.

    One of our own listens on the loopback address alone and sends no statistics to anybody; it ends with this.
    Raises ConfigError where Ray is not installed, ClusterUnavailable where there is no cluster at the address, where it
    is of another version of Ray or Python, and where it has no CPU for each worker.
    """
    there = address or os.environ.get("RAY_ADDRESS")
    there = None if there == "local" else there
    os.environ.setdefault(*NO_OTHER)
    if not there:
        _settle()
    ray = import_ray()
    if there:
        require(there)
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
        ) as error:  # Ray raises that itself, where a process of its own does not start in time
            where = there or "this machine"
            raise ClusterUnavailable(f"no Ray cluster can be had at {where}: {_one_line(error)}") from error
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        free = (
            int(ray.available_resources().get("CPU", 0)) if there else sum(cpus)
        )  # it takes a moment to tell
        each = cpus_each(cpus, free, workers)
        if not each:
            raise ClusterUnavailable(
                f"{workers} workers need a CPU each, and of the {sum(cpus)} of the Ray cluster at {there} {free} are "
                f"free: ask for fewer, add a machine (ray start --address ...), or end what else runs there"
            )
        yield Share(each, int(ray.cluster_resources().get("GPU", 0) >= workers))
    finally:
        ray.shutdown()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def require(address: str) -> None:
    """Raise ClusterUnavailable in seconds where no cluster answers at an address. Ray itself tries for minutes."""
    ray = import_ray()
    services: Any = importlib.import_module("ray._private.services")
    if address == "auto":
        _take_token()
    if "://" in address:
        raise ClusterUnavailable(
            f"{address} is not the address of a Ray cluster: give auto or HOST:PORT, on a machine that belongs to it"
        )
    try:
        found = services.canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError, OSError) as error:
        raise ClusterUnavailable(
            f"there is no Ray cluster at {address!r}, such as auto or HOST:6379: {_one_line(error)}"
        ) from None
    version = _version(found, address if found == address else f"{address} ({found})")
    if version != ray.__version__:
        raise ClusterUnavailable(
            f"the cluster at {address} runs Ray {version}, and this is Ray {ray.__version__}: install the same on both"
        )


def _take_token() -> None:
    """As Ray does for a cluster that it finds on this machine, where the user has not set RAY_AUTH_MODE."""
    setup: Any = importlib.import_module("ray._private.authentication.authentication_token_setup")
    logging.getLogger(setup.__name__).setLevel(logging.ERROR)  # it warns of what is as it should be
    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _version(address: str, named: str) -> str:
    """Of the Ray whose head listens at HOST:PORT, as it says itself. Raises ClusterUnavailable, by how users call it."""
    grpc: Any = importlib.import_module("grpc")  # Ray Serve's own
    calls: Any = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
    messages: Any = importlib.import_module("ray.core.generated.gcs_service_pb2")
    channels: Any = importlib.import_module("ray._private.grpc_utils")
    try:
        with channels.init_grpc_channel(address) as channel:
            head = calls.NodeInfoGcsServiceStub(channel)
            version: str = head.CheckAlive(messages.CheckAliveRequest(), timeout=ANSWER_S).ray_version
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise ClusterUnavailable(
                f"the Ray cluster at {named} wants its token: set RAY_AUTH_MODE=token, and have its head's "
                "~/.ray/auth_token here, too, or in RAY_AUTH_TOKEN"
            ) from None
        raise ClusterUnavailable(
            f"no Ray cluster answers at {named} ({error.code().name.lower()}): start one there by "
            "ray start --head, or leave --ray and RAY_ADDRESS out to have one on this machine"
        ) from None
    return version


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


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
        raise ConfigError(f"workers need Ray: {install_hint('ray')} ({error})") from None
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


def cpus_each(cpus: Sequence[int], free: int, workers: int) -> int:
    """The most that each of the workers can have, of machines with so many CPUs and so many free in all; 0 for too few.

    A worker's CPUs are on one machine.
    """
    fits = (n for n in range(free // workers, 0, -1) if sum(has // n for has in cpus) >= workers)
    return next(fits, 0)


def has_room(share: Share) -> bool:
    """Whether any machine of the connected cluster is large enough for one worker, however much of it is in use."""
    need = {"CPU": share.cpus, "GPU": share.gpus}
    alive = (node["Resources"] for node in import_ray().nodes() if node["Alive"])
    return any(all(has.get(kind, 0) >= n for kind, n in need.items()) for has in alive)


def worker_config(config: Config, folder: Path) -> Config:
    """An index's settings for an engine without the index: its store by a path that holds in any working folder."""
    path = (config.store.path or folder / "kv").absolute()
    return changed(config, store={**config.store.model_dump(), "path": path})
