"""CPUs counted in made-up cgroups, the user's environment kept, and a fresh process that has what was settled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from blendserve import threads
from blendserve.config import ModelConfig
from blendserve.models.loader import load_model
from blendserve.threads import COUNT, POLICY, SPIN, SPINS, Cpus, Settled, find_cpus, settle
from tests.bench.conftest import write_shape
from tests.support.kernel_switches import threads as limited

CGROUPS: dict[str, tuple[str, dict[str, str], float | None]] = {  # own cgroups, limits, quota in CPUs
    "none": ("0::/\n", {}, None),
    "no limit": ("0::/a\n", {"a": "max 100000"}, None),
    "own": ("0::/a\n", {"a": "150000 100000"}, 1.5),
    "in a container": ("0::/\n", {"": "200000 100000"}, 2.0),
    "the path is the host's": ("0::/../../pod/x\n", {"": "100000 100000"}, 1.0),
    "further up": ("0::/a/b/c\n", {"a/b/c": "max 100000", "a/b": "300000 100000", "a": "50000 100000"}, 0.5),
    "a sibling's limit": ("0::/a\n", {"b": "50000 100000"}, None),
    "v1 beside v2": ("3:cpu:/a\n0::/b\n", {"b": "250000 100000"}, 2.5),
    "damaged": ("0::/a\nnonsense\n::\n", {"a": "many", "": "1 0"}, None),
}


def mount(folder: Path, own: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """What `find_cpus` takes: the list of own cgroups, and their file systems."""
    (folder / "own").write_text(own)
    for name, limit in limits.items():
        (folder / "mounts" / name).mkdir(parents=True, exist_ok=True)
        (folder / "mounts" / name / "cpu.max").write_text(f"{limit}\n")
    return folder / "own", folder / "mounts"


@pytest.mark.parametrize("case", CGROUPS)
def test_the_quota_is_the_least_on_the_way_up(case: str, tmp_path: Path) -> None:
    own, limits, expected = CGROUPS[case]
    found = find_cpus(*mount(tmp_path, own, limits))
    assert (found.quota, found.affinity) == (expected, len(os.sched_getaffinity(0)))
    assert find_cpus(tmp_path / "nowhere", tmp_path).quota is None


def test_threads_are_as_many_as_can_run() -> None:
    cpus = Cpus(8), Cpus(8, 3.0), Cpus(8, 2.5), Cpus(8, 0.2), Cpus(2, 16.0), Cpus(1)
    assert [each.count for each in cpus] == [8, 3, 3, 1, 2, 1]


@pytest.mark.parametrize(
    ("given", "cpus", "expected"),
    [
        ({}, Cpus(4), {SPIN: SPINS}),
        ({}, Cpus(4, 2.0), {SPIN: SPINS, COUNT: "2"}),
        ({POLICY: "active"}, Cpus(4), {}),
        ({SPIN: "7"}, Cpus(4, 1.0), {COUNT: "1"}),
        ({COUNT: "3"}, Cpus(4, 1.0), {SPIN: SPINS}),
        ({POLICY: ""}, Cpus(4), {SPIN: SPINS}),
    ],
)
def test_what_the_user_has_set_stays(given: dict[str, str], cpus: Cpus, expected: dict[str, str]) -> None:
    environment, untouched = dict(given), dict(given)
    settled = settle(environment, cpus, too_late=False)
    assert environment == given | expected == given | settled.ours
    assert settled.theirs == {name: value for name, value in given.items() if value}
    late = settle(untouched, cpus, too_late=True)
    assert (untouched, late.ours, late.too_late) == (given, {}, True)
    assert late.count == (None if COUNT in given else cpus.count)  # torch can still be told


FRESH = """
import json, os, pathlib, sys
import blendserve.threads as threads
from blendserve.threads import COUNT, SPIN
import blendserve
told = [threads.SETTLED.too_late, "torch" in sys.modules, os.environ.get(SPIN)]
os.environ.pop(COUNT, None)
threads.SETTLED = threads.settle(os.environ, threads.find_cpus(*map(pathlib.Path, sys.argv[1:])), False)
import torch, faiss
from concurrent.futures import ThreadPoolExecutor
counts = lambda: [torch.get_num_threads(), faiss.omp_get_max_threads()]
print(json.dumps([*told, *counts(), *ThreadPoolExecutor(1).submit(counts).result()]))
"""


def test_a_fresh_process_settles_before_torch_and_follows_a_quota(tmp_path: Path) -> None:
    """torch's threads, those of a thread that starts later, and the index's; and what libgomp has read."""
    places = map(str, mount(tmp_path, "0::/\n", {"": "100000 100000"}))
    kept = {name: value for name, value in os.environ.items() if name not in (POLICY, SPIN, COUNT)}
    command, env = [sys.executable, "-c", FRESH, *places], kept | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert json.loads(done.stdout.splitlines()[-1]) == [False, False, SPINS, 1, 1, 1, 1]
    assert SPIN not in done.stderr or f"{SPIN} = '{SPINS}'" in done.stderr  # of another OpenMP it is not told


@pytest.mark.parametrize(("asked", "theirs", "count"), [(None, {}, 1), (3, {}, 3), (None, {COUNT: "2"}, 2)])
def test_a_reader_sets_the_count_for_threads_to_come(
    asked: int | None, theirs: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SETTLED", Settled(Cpus(2, 1.0), {}, theirs, too_late=True))
    with limited(2), ThreadPoolExecutor(1) as pool:
        load_model(ModelConfig(name=write_shape(tmp_path), dtype="float32", threads=asked))
        assert torch.get_num_threads() == pool.submit(torch.get_num_threads).result() == count
