"""CPUs counted in invented cgroups, the user's environment respected, and processes that really have what was settled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve import threads
from blendserve.config import ReaderConfig
from blendserve.models.loader import load_reader
from blendserve.threads import COUNT, POLICY, SPIN, SPINS, Cpus, Settled, find_cpus, settle
from tests.bench.conftest import write_shape

V1 = {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}
FREE_V1 = {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}

# own cgroups; files below the mount; CPUs' worth of time
CGROUPS: dict[str, tuple[str, dict[str, str], float | None]] = {
    "none": ("0::/\n", {}, None),
    "version 2, no limit": ("0::/a\n", {"a/cpu.max": "max 100000"}, None),
    "version 2": ("0::/a\n", {"a/cpu.max": "150000 100000"}, 1.5),
    "version 2, as a container sees it": ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),
    "version 2, the path is the host's": ("0::/../../pod/x\n", {"cpu.max": "100000 100000"}, 1.0),
    "version 2, the limit is further up": (
        "0::/a/b/c\n",
        {"a/b/c/cpu.max": "max 100000", "a/b/cpu.max": "300000 100000", "a/cpu.max": "50000 100000"},
        0.5,
    ),
    "version 2, a sibling's limit": ("0::/a\n", {"b/cpu.max": "50000 100000"}, None),
    "version 1": ("4:memory:/m\n3:cpu:/a\n", {f"cpu/a/{n}": v for n, v in V1.items()}, 0.5),
    "version 1, no limit": ("3:cpu:/a\n", {f"cpu/a/{n}": v for n, v in FREE_V1.items()}, None),
    "version 1, together with cpuacct": (
        "3:cpu,cpuacct:/docker/x\n",  # only the container's own part is mounted
        {f"cpu,cpuacct/{n}": v for n, v in V1.items()},
        0.5,
    ),
    "version 1, a limit of cpuset": ("3:cpuset:/a\n", {f"cpuset/a/{n}": v for n, v in V1.items()}, None),
    "both versions": (
        "3:cpu:/a\n0::/b\n",
        {"unified/b/cpu.max": "250000 100000", **{f"cpu/a/{n}": v for n, v in V1.items()}},
        0.5,
    ),
    "damaged": ("0::/a\nnonsense\n::\n", {"a/cpu.max": "many", "cpu.max": "1 0"}, None),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_a_quota_is_the_least_on_the_way_up(case: str, tmp_path: Path) -> None:
    own, files, expected = CGROUPS[case]
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        file = tmp_path / "mounts" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    found = find_cpus(tmp_path / "own", tmp_path / "mounts")
    assert found.quota == expected
    assert found.affinity == len(os.sched_getaffinity(0))


def test_without_proc_there_is_no_quota(tmp_path: Path) -> None:
    assert find_cpus(tmp_path / "nowhere", tmp_path).quota is None


@pytest.mark.parametrize(
    ("affinity", "quota", "count"),
    [(8, None, 8), (8, 3.0, 3), (8, 2.5, 3), (8, 0.2, 1), (2, 16.0, 2), (1, None, 1)],
)
def test_threads_are_as_many_as_can_run(affinity: int, quota: float | None, count: int) -> None:
    assert Cpus(affinity, quota).count == count


@pytest.mark.parametrize(
    ("given", "cpus", "expected"),
    [
        ({}, Cpus(4), {SPIN: SPINS}),
        ({}, Cpus(4, 2.0), {SPIN: SPINS, COUNT: "2"}),
        ({}, Cpus(4, 4.0), {SPIN: SPINS}),
        ({POLICY: "active"}, Cpus(4), {}),
        ({SPIN: "7"}, Cpus(4, 1.0), {COUNT: "1"}),
        ({COUNT: "3"}, Cpus(4, 1.0), {SPIN: SPINS}),
        ({POLICY: ""}, Cpus(4), {SPIN: SPINS}),
    ],
)
def test_what_the_user_has_set_stays(given: dict[str, str], cpus: Cpus, expected: dict[str, str]) -> None:
    environment = dict(given)
    settled = settle(environment, cpus, too_late=False)
    assert settled.ours == expected
    assert environment == given | expected
    assert settled.theirs == {name: value for name, value in given.items() if value}


def test_after_torch_nothing_is_set_and_it_is_said() -> None:
    environment: dict[str, str] = {}
    settled = settle(environment, Cpus(4, 1.0), too_late=True)
    assert environment == {}
    assert "torch was loaded before blendserve" in str(settled)
    assert f"{SPIN}={SPINS}" in str(settled)
    assert settled.count == 1  # torch can still be told


def child(code: str, environment: dict[str, str] | None = None) -> Any:
    """What a fresh process prints as JSON, without what this one was given or has settled."""
    kept = {name: value for name, value in os.environ.items() if name not in (POLICY, SPIN, COUNT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=kept | (environment or {}))
    return json.loads(done.stdout.splitlines()[-1])


LOOK = (
    "import os, json; print(json.dumps([os.environ.get(n) for n in ('GOMP_SPINCOUNT', 'OMP_NUM_THREADS')]))"
)


@pytest.mark.parametrize(
    "first",
    [
        "blendserve",
        "blendserve.cli",
        "blendserve.engine",
        "blendserve.serve.app",
        "blendserve.retrieve.index",
    ],
)
def test_importing_any_part_settles_it_before_torch(first: str) -> None:
    look = f"import {first}; from blendserve.threads import SETTLED; assert not SETTLED.too_late; {LOOK}"
    assert child(look)[0] == SPINS
    assert child(look, {POLICY: "active"})[0] is None


def test_libgomp_reads_what_was_settled() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "import blendserve, torch"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_DISPLAY_ENV": "verbose", SPIN: "", POLICY: ""},
    ).stderr
    if SPIN not in shown:
        pytest.skip("torch's OpenMP here is not libgomp")
    assert f"{SPIN} = '{SPINS}'" in shown


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_threads_follow_a_quota_below_the_cores(tmp_path: Path) -> None:
    """torch's threads, those of a thread that is started later, and the index's."""
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "own").write_text("0::/\n")
    look = (
        "import pathlib, json, blendserve.threads as t, os\n"
        f"os.environ.pop({COUNT!r}, None)\n"
        f"t.SETTLED = t.settle(os.environ, t.find_cpus(pathlib.Path({str(tmp_path / 'own')!r}), "
        f"pathlib.Path({str(tmp_path)!r})), False)\n"
        "import torch, faiss\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "later = ThreadPoolExecutor(1).submit(lambda: (torch.get_num_threads(), faiss.omp_get_max_threads()))\n"
        "print(json.dumps([torch.get_num_threads(), faiss.omp_get_max_threads(), *later.result()]))"
    )
    assert child(look) == [1, 1, 1, 1]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_threads_follow_affinity() -> None:
    look = (
        "import os, json; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); import blendserve, torch; "
    )
    look += "print(json.dumps(torch.get_num_threads()))"
    assert child(look) == 1


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("asked", "theirs", "expected"),
    [(None, {}, 1), (3, {}, 3), (None, {COUNT: "2"}, 2)],
    ids=["as many as the quota pays for", "as many as asked for", "as many as the environment says"],
)
def test_a_reader_takes_the_count(
    asked: int | None,
    theirs: dict[str, str],
    expected: int,
    two_threads: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So do the threads that a server starts: torch hands its number on to each."""
    monkeypatch.setattr(threads, "SETTLED", Settled(Cpus(2, 1.0), {}, theirs, too_late=True))
    load_reader(ReaderConfig(model=write_shape(tmp_path), dtype="float32", threads=asked))
    assert torch.get_num_threads() == expected
    look = torch.get_num_threads
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(look).result() == expected
