"""Other work beside a bench: busy processes, one core's worth of time, and a link. Nothing outlives its bench."""

from __future__ import annotations

import os
import socket
import socketserver
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
from blendserve.bench.link import Link, Weather
from blendserve.bench.link_process import LinkProcess
from blendserve.bench.load import busy, one_core
from blendserve.bench.remote import weather
from blendserve.errors import InputError
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
    before = os.sched_getaffinity(0)
    with one_core(tmp_path) as limited:
        assert limited.how == "affinity"
        count = [sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"]
        assert limited.popen(count, dict(os.environ)).communicate()[0].strip() == "1"
    assert os.sched_getaffinity(0) == before
    with one_core() as limited:
        if limited.folder is None:
            pytest.skip("no cgroup can be made here")
        process = limited.popen(["cat", "/proc/self/cgroup"], dict(os.environ))
        assert limited.folder.name in process.communicate()[0]
    assert not limited.folder.exists()


def test_a_measured_process_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        start.timed((sys.executable, "-c", "raise SystemExit('no index here')"))
    (tmp_path / "log").write_text("")
    with load.start(["sh", "-c", "read x; exit 3"], dict(os.environ)) as process, pytest.raises(InputError):
        crowded.Subject(process, {}, tmp_path / "log")


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while piece := self.request.recv(64 * KB):
            self.request.sendall(piece)


@contextmanager
def echo() -> Iterator[int]:
    """A server that sends back what it gets; yields its port."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def dial(link: Link | LinkProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), timeout=300)


def echoed(line: socket.socket, sent: bytes) -> tuple[bytes, float]:
    """What came back, and after how many seconds."""
    start, got = time.monotonic(), bytearray()
    threading.Thread(target=line.sendall, args=(sent,), daemon=True).start()
    while len(got) < len(sent) and (piece := line.recv(64 * KB)):
        got += piece
    return bytes(got), time.monotonic() - start


def test_a_link_passes_on_delays_once_holds_and_cuts_and_its_process_ends_with_its_block() -> None:
    sent = bytes(range(256)) * 4 * KB
    with echo() as port:
        with LinkProcess(port) as link, dial(link) as line:
            assert echoed(line, sent)[0] == sent
            assert link.n_bytes == len(sent)
            link.set_to(Weather(delay_s=0.125))
            assert echoed(line, b"ping")[1] >= 0.25
            # A thousand pieces that each waited would need four minutes.
            assert 0.25 <= echoed(line, bytes(64 * KB * 1_000))[1] < 60
            link.set_to(Weather(dead=True))
            before = link.n_bytes  # it has read the weather by now
            line.sendall(b"late")
            line.settimeout(0.05)
            with pytest.raises(TimeoutError):
                line.recv(1)
            link.set_to(Weather())
            line.settimeout(300)
            assert line.recv(4) == b"late"
            assert link.n_bytes == before + 4
            link.set_to(Weather(cut_after=1_000, delay_s=0.01))
            with dial(link) as other:
                assert len(echoed(other, bytes(10 * KB))[0]) == 1_000
        with pytest.raises(ProcessLookupError):
            os.kill(link.pid, 0)


def test_a_rate_is_that_of_all_connections_together() -> None:
    sent, rate = bytes(256 * KB), 2_000_000.0
    with echo() as port, Link(port) as link, dial(link) as one, dial(link) as other:
        link.weather = Weather(bytes_per_s=rate)
        with ThreadPoolExecutor(2) as pool:
            seconds = pool.map(lambda line: echoed(line, sent)[1], (one, other))
        assert max(seconds) >= 2 * len(sent) / rate - 0.01  # what a burst may save
    assert weather(50.0, 1.0) == Weather(bytes_per_s=125e6, delay_s=0.025)
