"""A cluster of our own, and what is said where there is none."""

from __future__ import annotations

import ipaddress
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from blendserve.config import Config
from blendserve.errors import ClusterUnavailable, ConfigError
from blendserve.workers.cluster import Share, cpus_each, has_room, require, worker_config
from blendserve.workers.precompute import PROBE, PrecomputeActor, precompute_index
from tests.engine.helpers import engine


def test_it_is_reached_from_this_machine_alone(share: Share) -> None:
    import ray

    assert share == Share(max(1, share.cpus), 0)
    assert has_room(share)
    assert not has_room(Share(99, 0))
    assert not has_room(Share(1, 99))
    assert all(ipaddress.ip_address(node["NodeManagerAddress"]).is_loopback for node in ray.nodes())


@pytest.mark.parametrize(
    ("cpus", "free", "workers", "each"),
    [
        ([8], 8, 2, 4),
        ([0, 4], 4, 2, 2),  # a head that is told to compute nothing
        ([4, 3], 7, 3, 2),  # 4 would be 2 and 2; 3, one
        ([2, 2], 4, 3, 1),
        ([8, 8], 3, 2, 1),  # the others are in use
        ([2], 2, 3, 0),
        ([8], 1, 2, 0),
    ],
)
def test_workers_get_what_they_can_all_have(cpus: list[int], free: int, workers: int, each: int) -> None:
    assert cpus_each(cpus, free, workers) == each


def test_where_nothing_listens_that_is_said_in_seconds() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ClusterUnavailable, match=rf"no Ray cluster answers at {address} .*: start one there"
        ):
            require(address)


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001"])
def test_what_is_no_address_is_said(address: str) -> None:
    with pytest.raises(ClusterUnavailable, match=r"auto or HOST:"):
        require(address)


def test_another_version_is_said(share: Share, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    require(address)
    monkeypatch.setattr(ray, "__version__", "1.0")
    with pytest.raises(ClusterUnavailable, match=r"runs Ray 2.*and this is Ray 1.0"):
        require(address)


def test_a_cluster_that_is_there_is_joined_and_one_that_is_too_small_says_so(share: Share) -> None:
    """By another process, as one process joins one cluster."""
    import ray

    code = (
        "import sys\nfrom blendserve.workers.cluster import cluster\n"
        "for n in (1, 99):\n    with cluster(sys.argv[1], n) as share:\n        print(share)\n"
    )
    command = [sys.executable, "-c", code, ray.get_runtime_context().gcs_address]
    told = subprocess.run(
        command, env={**os.environ, "RAY_AUTH_MODE": "token"}, capture_output=True, text=True
    )
    assert "Share(cpus=" in told.stdout
    assert "99 workers need a CPU each" in told.stderr
    refused = subprocess.run(
        command, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, capture_output=True, text=True
    )
    assert "wants its token: set RAY_AUTH_MODE=token" in refused.stderr


def test_workers_refuse_a_store_that_they_cannot_share() -> None:
    with engine() as alone, pytest.raises(ConfigError, match="cannot share a store of kind 'memory'"):
        precompute_index(alone, Path("there"), 2)


def test_a_worker_with_another_reader_is_refused() -> None:
    with engine() as alone:
        PrecomputeActor(lambda: alone, alone.blender.key(PROBE))
        with pytest.raises(ConfigError, match="other weights or another number format"):
            PrecomputeActor(lambda: alone, alone.blender.key(PROBE, ()))


def test_a_worker_finds_the_index_s_store_from_any_folder(tmp_path: Path) -> None:
    assert worker_config(Config(), tmp_path / "index").store.path == tmp_path / "index" / "kv"
    named = Config(store={"path": "kv-0"})
    assert worker_config(named, tmp_path / "index").store.path == Path.cwd() / "kv-0"
