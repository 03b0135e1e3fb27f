"""The bench beside busy processes: its figures fit together, and nothing that it starts outlives it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from blendserve.bench import crowded, load
from blendserve.bench.config import CrowdedConfig
from blendserve.bench.load import busy, one_core, start
from blendserve.bench.tables import crowded as tables
from blendserve.config import changed
from blendserve.errors import ConfigError, InputError
from blendserve.threads import COUNT, SPIN

SMALL = CrowdedConfig(
    chunks=2, chunk_tokens=40, suffix_tokens=25, new_tokens=3, dtype="float32", busy=(1,), repeats=2
)


def test_libgomp_left_alone_may_be_left_out() -> None:
    assert set(crowded._environments(SMALL)) == {crowded.OURS, crowded.LIBGOMP}
    assert set(crowded._environments(changed(SMALL, ours_alone=True))) == {crowded.OURS}


def children(of: int | None = None) -> set[int]:
    """Processes whose parent is this one."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if parent == (of or os.getpid()):
            found.add(int(status.parent.name))
    return found


def test_every_process_runs_every_request_in_every_situation(tiny: str, tmp_path: Path) -> None:
    before = children()
    figures = crowded.measure(changed(SMALL, model=tiny, folder=tmp_path / "kv", ours_alone=True))
    assert children() <= before
    assert list((tmp_path / "kv").iterdir()) == []
    (requests,) = figures["subjects"].values()
    assert set(requests) == {"decode", "transformers", "full", "reuse", "query+prior@0.15"}
    assert set(requests["transformers"]) == {"ttft", "per_token"}
    for parts in requests.values():
        for cells in parts.values():
            assert set(cells) == {"alone", "beside 1", "one core"}
            assert cells["alone"]["times_alone"]["rounds"] == [1.0, 1.0]
            pairs = zip(
                cells["one core"]["seconds"]["rounds"], cells["alone"]["seconds"]["rounds"], strict=True
            )
            assert cells["one core"]["times_alone"]["rounds"] == [a / b for a, b in pairs]
    if figures["one_core_by"] == "cgroup quota":
        assert figures["threads"]["one core"] == {"blendserve": 1}
    shown = tables(figures)
    assert all(len(columns) == len(row) for _, columns, rows in shown for row in rows)


def test_ours_alone_is_held_against_libgomp_alone() -> None:
    taken = {
        ("alone", "blendserve", "decode", "per_token"): [0.3, 0.2],
        ("alone", "libgomp alone", "decode", "per_token"): [0.2, 0.2],
        ("one core", "blendserve", "decode", "per_token"): [0.9, 0.9],
        ("alone", "blendserve", "full", "ttft"): [1.0, 1.0],
    }
    assert {request: set(figures) for request, figures in crowded._cost(taken).items()} == {
        "decode": {"per_token"}
    }
    assert crowded._cost(taken)["decode"]["per_token"]["rounds"] == [pytest.approx(1.5), 1.0]


def test_busy_processes_are_busy_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    with busy(2):
        started = children() - before
        assert len(started) == 2
        assert all(os.getpgid(pid) == pid for pid in started)
        assert all(
            os.getsid(pid) == os.getsid(0) for pid in started
        )  # or each would count as much as all of us
        deadline = time.monotonic() + 300
        while not all(ticks(pid) for pid in started):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not started & children()
    with pytest.raises(RuntimeError), busy(1):
        raise RuntimeError
    assert children() == before
    monkeypatch.setattr(load, "LONGEST", 0)
    with pytest.raises(InputError, match="ended early"), busy(1):
        wait_for((children() - before).pop())


def wait_for(pid: int) -> None:
    """Until it has ended; whoever started it still sees it."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def ticks(pid: int) -> int:
    """Clock ticks that a process has spent computing."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.skipif(sys.platform != "linux", reason="a signal at the parent's death is Linux's")
def test_busy_processes_end_with_a_bench_that_is_killed() -> None:
    code = "from blendserve.bench.load import busy\nwith busy(1):\n    print('on', flush=True)\n    input()"
    bench = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert bench.stdout is not None
    assert bench.stdin is not None
    bench.stdout.readline()
    (pid,) = children(bench.pid)
    bench.kill()
    bench.wait()
    bench.stdin.close()
    bench.stdout.close()
    deadline = time.monotonic() + 300
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_where_no_cgroup_can_be_made_it_is_one_cpu(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    before = os.sched_getaffinity(0)
    with one_core(tmp_path) as limited:
        assert limited.how == "affinity"
        look = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
        process = limited.popen(look, dict(os.environ))
        assert process.communicate()[0].strip() == "1"
    assert os.sched_getaffinity(0) == before
    assert list((tmp_path / "cpu").iterdir()) == []


def test_a_cgroup_that_can_be_made_holds_its_process_and_goes() -> None:
    with one_core() as limited:
        if limited.folder is None:
            pytest.skip("no cgroup can be made here")
        process = limited.popen(["cat", "/proc/self/cgroup"], dict(os.environ))
        assert limited.folder.name in process.communicate()[0]
    assert not limited.folder.exists()


def test_libgomp_alone_is_given_its_own_default_and_others_what_was_asked_for() -> None:
    config = changed(SMALL, environments=("OMP_WAIT_POLICY=passive", "GOMP_SPINCOUNT=9 OMP_NUM_THREADS=1"))
    found = crowded._environments(config)
    assert found["blendserve"] == {}
    assert found["libgomp alone"] == {SPIN: "300000", COUNT: str(len(os.sched_getaffinity(0)))}
    assert found["OMP_WAIT_POLICY=passive"] == {"OMP_WAIT_POLICY": "passive"}
    assert found["GOMP_SPINCOUNT=9 OMP_NUM_THREADS=1"] == {SPIN: "9", COUNT: "1"}
    with pytest.raises(ConfigError):
        CrowdedConfig(environments=("passive",))


def test_a_process_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ended early: .*smollm2"):
        crowded.measure(changed(SMALL, model="nobody/nothing", folder=tmp_path))
    process = start(["sh", "-c", "exit 3"], dict(os.environ))
    (tmp_path / "log").write_text("")
    with pytest.raises(InputError, match="exit code 3"):
        crowded.Subject(process, {}, tmp_path / "log")
