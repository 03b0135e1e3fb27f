"""A cluster of our own, and what is said where there is none."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from blendserve.config import Config
from blendserve.errors import ConfigError
from blendserve.workers.cluster import Share, worker_config
from blendserve.workers.precompute import PROBE, PrecomputeActor, precompute_index
from tests.engine.helpers import engine


def test_it_is_reached_from_this_machine_alone(share: Share) -> None:
    import ray

    assert share == Share(max(1, share.cpus), 0)
    assert all(ipaddress.ip_address(node["NodeManagerAddress"]).is_loopback for node in ray.nodes())


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
