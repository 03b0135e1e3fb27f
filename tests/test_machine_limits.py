"""Defaults that follow the machine: available memory under any cgroups, and room on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import ByteSize

from blendserve.config import ServeConfig, StoreConfig
from blendserve.engine.batch_engine import BatchEngine
from blendserve.engine.request import Observer
from blendserve.errors import ConfigError
from blendserve.fetch import open_store
from blendserve.fetch.copies import open_copies
from blendserve.fetch.write_queue import WriteQueue
from blendserve.machine import available_memory, free_disk
from blendserve.models.kv_cache import LEAST_TOKENS
from blendserve.store.last_messages import LastMessages
from tests.support.engines import toy_engine

GB = 1_000_000_000
SYSTEM = 24 * GB
LITTLE = 32_000_000
V2 = "0::/pod/app\n"
V1 = "5:cpu,cpuacct:/other\n4:memory:/pod/app\n"
MACHINES: dict[str, tuple[str, Mapping[str, str], int]] = {
    "no cgroups": ("", {}, SYSTEM),
    "no limit": (V2, {"memory.max": "max", "memory.current": "5"}, SYSTEM),
    "a container's root": (V2, {"memory.max": f"{2 * GB}", "memory.current": f"{GB // 2}"}, GB * 3 // 2),
    "a limit above": (V2, {"pod/memory.max": f"{4 * GB}", "pod/memory.current": f"{GB}"}, 3 * GB),
    "the smallest limit": (
        V2,
        {"pod/memory.max": f"{4 * GB}", "pod/memory.current": "0"}
        | {"pod/app/memory.max": f"{GB}", "pod/app/memory.current": "0"},
        GB,
    ),
    "kept files": (
        V2,
        {
            "memory.max": f"{2 * GB}",
            "memory.current": f"{2 * GB}",
            "memory.stat": f"anon 7\ninactive_file {GB}",
        },
        GB,
    ),
    "full": (V2, {"memory.max": f"{GB}", "memory.current": f"{2 * GB}"}, 0),
    "version 1": (
        V1,
        {
            "memory/pod/app/memory.limit_in_bytes": f"{3 * GB}",
            "memory/pod/app/memory.usage_in_bytes": f"{GB}",
        },
        2 * GB,
    ),
    "version 1 without a limit": (
        V1,
        {"memory/memory.limit_in_bytes": f"{2**63 - 4096}", "memory/memory.usage_in_bytes": "0"},
        SYSTEM,
    ),
    "another controller's": (V1, {"cpu/memory.limit_in_bytes": "1", "memory.max": "1"}, SYSTEM),
}


@pytest.mark.parametrize("name", MACHINES)
def test_available_memory_is_the_least_that_system_and_cgroups_leave(name: str, tmp_path: Path) -> None:
    own, files, expected = MACHINES[name]
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    tree = {
        proc / "self" / "cgroup": own,
        proc / "meminfo": f"MemTotal: 1 kB\nMemAvailable: {SYSTEM // 1024} kB\n",
    }
    tree |= {cgroups / file: text for file, text in files.items()}
    for path, text in tree.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory(proc, cgroups) == pytest.approx(expected, abs=1024)


def test_this_machine_has_some_memory_and_a_disk_that_need_not_exist_yet(tmp_path: Path) -> None:
    assert available_memory() > 0
    assert free_disk(tmp_path / "not" / "yet") == pytest.approx(free_disk(tmp_path) or 0, rel=0.5)


@pytest.mark.parametrize(("location", "expected"), [("memory", 2 * GB), ("", 2 * GB), ("kv", 7 * GB)])
def test_a_store_without_a_cap_fits_the_machine(
    location: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.machine.available_memory", lambda: 8 * GB)
    monkeypatch.setattr("blendserve.store.lmdb.free_disk", lambda path: 7 * GB)
    if location == "kv":
        location = str(tmp_path / location)
    with open_store(StoreConfig(location=location), None) as store:
        assert store.cap_bytes == expected
    with open_store(StoreConfig(location=location, cap_gb=20), None) as store:
        assert store.cap_bytes == 20 * GB  # what the user says holds


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with little memory."""
    monkeypatch.setattr("blendserve.machine.available_memory", lambda: LITTLE)


def batch_of(**settings: Any) -> BatchEngine:
    return BatchEngine(toy_engine(), Mock(Observer), ServeConfig(**settings))


def test_a_server_without_sizes_fits_a_small_machine(small: None, tmp_path: Path) -> None:
    batch = batch_of(slots=9)
    pool, decoder = batch.pool, batch.engine.model.decoder
    assert pool.n == 9
    assert LEAST_TOKENS < pool.n_tokens < decoder.context_limit
    assert pool.n * pool.n_tokens * decoder.kv_bytes_per_token == pytest.approx(LITTLE / 2, rel=0.01)
    assert 0 < batch.fetcher.copies.shared.cap_bytes <= LITTLE // 8
    assert 0 < batch.engine.blender.prefixes.cap_bytes <= LITTLE // 8
    assert 0 < WriteQueue().cap_bytes <= LITTLE // 8


def test_slots_that_do_not_fit_a_small_machine_are_refused(small: None) -> None:
    decoder = toy_engine().model.decoder
    n = LITTLE // decoder.kv_bytes_per_token // 512
    assert batch_of(slots=n, slot_tokens=512).pool.n_tokens == 512
    for settings, name in (
        ({"slots": n + 1, "slot_tokens": 512}, "serve.slot_tokens"),
        ({"slots": 3 * n}, "serve.slots"),
    ):
        with pytest.raises(ConfigError) as caught:
            batch_of(**settings)
        assert caught.value.setting == name


@pytest.mark.parametrize(
    "setting", ["store.cap_gb", "store.memory_bytes", "serve.conversations_mb", "a disk"]
)
def test_a_cap_that_a_small_machine_cannot_hold_is_named(
    setting: str,
    small: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It holds, as it may never be reached."""
    monkeypatch.setattr("blendserve.store.lmdb.free_disk", lambda path: LITTLE)
    if setting == "serve.conversations_mb":
        batch_of(slots=1, conversations_mb=2000)
    elif setting == "store.memory_bytes":
        open_copies(StoreConfig(memory_bytes=ByteSize(2 * GB)), torch.device("cpu"))
    else:
        location = str(tmp_path / "kv") if setting == "a disk" else "memory"
        with open_store(StoreConfig(location=location, cap_gb=2), None) as store:
            assert store.cap_bytes == 2 * GB
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.args
    assert {2000, LITTLE // 10**6} <= set(record.args)


def test_messages_that_are_given_once_take_bounded_memory() -> None:
    once = LastMessages(most=3)
    assert [once.is_new(message) for message in "ababc"] == [True, True, False, False, True]
    assert not once.is_new("a")
    assert all(once.is_new(f"{n} s left") for n in range(1000))
    assert once.is_new("a")  # forgotten: what is remembered is bounded
