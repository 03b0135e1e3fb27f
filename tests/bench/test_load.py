"""Other work beside a bench: busy processes, one core's worth of time, and a link. Nothing outlives its bench."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from blendserve.bench import crowded, load, start
from blendserve.bench.config import CrowdedConfig
from blendserve.bench.link import Link, Weather
from blendserve.bench.link_process import LinkProcess
from blendserve.bench.load import busy, one_core
from blendserve.bench.remote import weather
from blendserve.errors import InputError
from blendserve.threads import COUNT, SPIN
from tests.support.waiting import eventually

KB = 1 << 10
HANGS = "from blendserve.bench.load import busy\nwith busy(1):\n    print('on', flush=True)\n    input()"


def children(of: int | None = None) -> set[int]:
    """Processes whose parent is this one, or `of`."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        if (words := stat(status.parent.name)) and int(words[1]) == (of or os.getpid()):
            found.add(int(status.parent.name))
    return found


def stat(pid: object) -> list[str]:
    """A process's state, parent and so on; [] when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def test_busy_processes_compute_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    with busy(2):
        started = children() - before
        assert len(started) == 2
        assert all(os.getpgid(pid) == pid and os.getsid(pid) == os.getsid(0) for pid in started)
        eventually(lambda: all(int(stat(pid)[11]) for pid in started))  # ticks of CPU time
    assert children() == before
    with pytest.raises(RuntimeError), busy(1):
        raise RuntimeError
    assert children() == before
    monkeypatch.setattr(load, "LONGEST", 0)
    with pytest.raises(InputError), busy(1):
        os.waitid(os.P_PID, (children() - before).pop(), os.WEXITED | os.WNOWAIT)


@pytest.mark.skipif(sys.platform != "linux", reason="a signal at the parent's death is Linux's")
def test_busy_processes_end_with_a_bench_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HANGS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as bench:
        assert bench.stdout is not None
        bench.stdout.readline()
        (pid,) = children(bench.pid)
        bench.kill()
        bench.wait()
        eventually(lambda: stat(pid)[:1] in ([], ["Z"]))


def test_one_core_is_a_cgroup_or_an_affinity(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    before = os.sched_getaffinity(0)
    with one_core(tmp_path) as limited:
        assert limited.how == "affinity"
        count = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
        assert limited.popen(count, dict(os.environ)).communicate()[0].strip() == "1"
    assert os.sched_getaffinity(0) == before
    assert list((tmp_path / "cpu").iterdir()) == []
    with one_core() as limited:
        if limited.folder is None:
            pytest.skip("no cgroup can be made here")
        process = limited.popen(["cat", "/proc/self/cgroup"], dict(os.environ))
        assert limited.folder.name in process.communicate()[0]
    assert not limited.folder.exists()


def test_measured_processes_differ_in_their_environment_alone() -> None:
    policies = ("OMP_WAIT_POLICY=passive", "GOMP_SPINCOUNT=9 OMP_NUM_THREADS=1")
    assert crowded.environments(CrowdedConfig(environments=policies)) == {
        crowded.OURS: {},
        crowded.LIBGOMP: {SPIN: "300000", COUNT: str(len(os.sched_getaffinity(0)))},
        policies[0]: {"OMP_WAIT_POLICY": "passive"},
        policies[1]: {SPIN: "9", COUNT: "1"},
    }
    assert set(crowded.environments(CrowdedConfig(ours_alone=True))) == {crowded.OURS}


def test_a_measured_process_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        start.timed((sys.executable, "-c", "raise SystemExit('no index here')"))
    (tmp_path / "log").write_text("")
    with load.start(["sh", "-c", "exit 3"], dict(os.environ)) as process, pytest.raises(InputError):
        crowded.Subject(process, {}, tmp_path / "log")


@contextmanager
def echo() -> Iterator[int]:
    """A server that sends back what it gets; yields its port."""

    def serve(line: socket.socket) -> None:
        while piece := line.recv(64 * KB):
            line.sendall(piece)
        line.close()

    def accept() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(line,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def dial(link: Link | LinkProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), timeout=300)


def echoed(line: socket.socket, sent: bytes) -> tuple[bytes, float]:
    """What came back, and after how many seconds."""
    start, got = time.monotonic(), bytearray()
    threading.Thread(target=line.sendall, args=(sent,), daemon=True).start()
    while len(got) < len(sent) and (piece := line.recv(64 * KB)):
        got += piece
    return bytes(got), time.monotonic() - start


def test_a_link_passes_everything_on_delays_it_once_and_cuts_it() -> None:
    sent = bytes(range(256)) * 4 * KB
    with echo() as port, Link(port) as link:
        with dial(link) as line:
            assert echoed(line, sent)[0] == sent
            assert link.up.n_bytes == link.down.n_bytes == len(sent)
            link.weather = Weather(delay_s=0.125)
            assert echoed(line, b"ping")[1] >= 0.25
            # A thousand pieces that each waited would need four minutes.
            assert 0.25 <= echoed(line, bytes(64 * KB * 1_000))[1] < 60
        link.weather = Weather(cut_after=1_000, delay_s=0.01)
        with dial(link) as line:
            assert len(echoed(line, bytes(10 * KB))[0]) == 1_000


def test_a_rate_is_that_of_all_connections_together() -> None:
    sent, rate = bytes(256 * KB), 2_000_000.0
    with echo() as port, Link(port) as link, dial(link) as one, dial(link) as other:
        link.weather = Weather(bytes_per_s=rate)
        with ThreadPoolExecutor(2) as pool:
            seconds = pool.map(lambda line: echoed(line, sent)[1], (one, other))
        assert max(seconds) >= 2 * len(sent) / rate - 0.01  # what a burst may save
    assert weather(50.0, 1.0) == Weather(bytes_per_s=125e6, delay_s=0.025)


def test_a_link_process_holds_bytes_while_it_is_dead_and_ends_with_its_block() -> None:
    with echo() as port:
        with LinkProcess(port) as link, dial(link) as line:
            assert echoed(line, b"x" * 1000)[0] == b"x" * 1000
            assert link.n_bytes == 1000
            link.set_to(Weather(dead=True))
            assert link.n_bytes == 1000  # it has read the weather by now
            line.sendall(b"y" * 500)
            line.settimeout(0.05)
            with pytest.raises(TimeoutError):
                line.recv(1)
            line.settimeout(300)
            link.set_to(Weather())
            got = b""
            while len(got) < 500:
                got += line.recv(500)
            assert link.n_bytes == 1500
        with pytest.raises(ProcessLookupError):
            os.kill(link.pid, 0)
