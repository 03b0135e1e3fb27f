"""What a bench puts beside or before what it measures: workers, busy processes, one core's time, a link."""

from __future__ import annotations

import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.cpu_contention import BusyProcesses, one_core
from benchmarks.startup import run_process
from benchmarks.support.proxy import GBIT, LinkConditions, Proxy, ProxyProcess, changing, network, rate_at
from benchmarks.support.worker import ROOT, WorkerProcess
from blendserve.errors import InputError
from tests.support.waiting import eventually

KB = 1 << 10
HANGS = """
from benchmarks.cpu_contention import BusyProcesses
with BusyProcesses() as busy:
    busy.set(1)
    print("on", flush=True)
    input()
"""


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


def test_busy_processes_compute_and_end() -> None:
    before = children()
    with BusyProcesses() as busy:
        busy.set(3)
        busy.set(2)
        started = children() - before
        assert len(started) == 2
        assert all(os.getsid(pid) == os.getsid(0) for pid in started)
        eventually(lambda: all(int(stat(pid)[11]) for pid in started))  # ticks of CPU time
        busy.processes[0].kill()
        busy.processes[0].wait()
        with pytest.raises(InputError):
            busy.set(2)
        busy.processes.pop(0)
    assert children() == before


def test_busy_processes_end_with_a_bench_that_is_killed() -> None:
    command, pipe = [sys.executable, "-c", HANGS], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as bench:
        assert bench.stdout is not None
        bench.stdout.readline()
        (pid,) = children(bench.pid)
        bench.kill()
        bench.wait()
        eventually(lambda: stat(pid)[:1] in ([], ["Z"]))


def test_one_core_is_a_cgroup_or_an_affinity(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    seen: list[Any] = []

    def start(launcher: Sequence[str]) -> WorkerProcess:
        seen.append((list(launcher), os.sched_getaffinity(0)))
        return cast(WorkerProcess, None)

    with one_core(tmp_path) as launch:  # an ordinary folder: no cgroup can be made
        launch(start)
    assert seen == [([], {max(before)})]
    assert os.sched_getaffinity(0) == before
    with one_core() as launch:
        launch(start)
        launcher, allowed = seen[1]
        if not launcher:
            pytest.skip("no cgroup can be made here")
        assert allowed == before
        command = [*launcher, "cat", "/proc/self/cgroup"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert Path(launcher[-1]).parent.name in done.stdout
    assert not Path(launcher[-1]).parent.exists()


def test_a_measured_process_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        run_process((sys.executable, "-c", "raise SystemExit('no index here')"), lambda out: {})
    with pytest.raises(InputError):
        WorkerProcess("benchmarks.support.no_such_module", {}, tmp_path / "log")


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


def dial(proxy: Proxy | ProxyProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=300)


def echoed(line: socket.socket, sent: bytes) -> tuple[bytes, float]:
    """What came back, and after how many seconds."""
    start, got = time.monotonic(), bytearray()
    threading.Thread(target=line.sendall, args=(sent,), daemon=True).start()
    while len(got) < len(sent) and (piece := line.recv(64 * KB)):
        got += piece
    return bytes(got), time.monotonic() - start


def test_a_proxy_forwards_delays_once_holds_and_closes_and_its_process_ends(tmp_path: Path) -> None:
    sent = bytes(range(256)) * 4 * KB
    with echo() as port:
        with ProxyProcess(port, tmp_path / "log") as proxy, dial(proxy) as line:
            assert echoed(line, sent)[0] == sent
            assert proxy.n_bytes == len(sent)
            proxy.set(LinkConditions(delay_s=0.125))
            assert echoed(line, b"ping")[1] >= 0.25
            # A thousand pieces that each waited would need four minutes.
            assert 0.25 <= echoed(line, bytes(64 * KB * 1_000))[1] < 60
            proxy.set(LinkConditions(blackhole=True))
            before = proxy.n_bytes
            line.sendall(b"late")
            line.settimeout(0.05)
            with pytest.raises(TimeoutError):
                line.recv(1)
            proxy.set(LinkConditions())
            line.settimeout(300)
            assert line.recv(4) == b"late"
            assert proxy.n_bytes == before + 4
            proxy.set(LinkConditions(close_after=1_000, delay_s=0.01))
            with dial(proxy) as other:
                assert len(echoed(other, bytes(10 * KB))[0]) == 1_000
        with pytest.raises(ProcessLookupError):
            os.kill(proxy.pid, 0)


def test_a_rate_is_that_of_all_connections_together() -> None:
    sent, rate = bytes(256 * KB), 2_000_000.0
    with echo() as port, Proxy(port) as proxy, dial(proxy) as one, dial(proxy) as other:
        proxy.conditions = LinkConditions(bytes_per_s=rate)
        with ThreadPoolExecutor(2) as pool:
            seconds = pool.map(lambda line: echoed(line, sent)[1], (one, other))
        assert max(seconds) >= 2 * len(sent) / rate - 0.01  # what a burst may save
    assert network(50.0, 1.0) == LinkConditions(bytes_per_s=125e6, delay_s=0.025)


def test_a_trace_is_its_steps_and_follows_from_the_seed() -> None:
    down = changing(0)["down"]
    assert [rate_at(down, at) / GBIT for at in (0.0, 0.049, 0.051, 1e9)] == [3, 3, 0.1, 0.1]
    assert changing(1) == changing(1) != changing(2)
