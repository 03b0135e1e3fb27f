"""What a bench puts beside or before what it measures: servers, workers, busy processes, a core's time, a link."""

from __future__ import annotations

import os
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.cpu_contention import BusyProcesses, one_core
from benchmarks.startup import run_process
from benchmarks.support.proxy import GBIT, LinkConditions, Proxy, ProxyProcess, changing, network, rate_at
from benchmarks.support.worker import WorkerProcess
from blendserve.bench.server_process import ServerProcess
from blendserve.errors import InputError, ServeError
from tests.support.waiting import eventually

KB = 1 << 10
SERVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
held = bytearray(b"x") * 30_000_000
print("Listening on nothing at all", file=sys.stderr)
print("Listening on http://here:" + sys.argv[1], flush=True)
signal.pause()
"""


def stat(pid: int) -> list[str]:
    """A process's state, parent and so on; "Z" when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z"]


def test_busy_processes_compute_and_end_in_time() -> None:
    with BusyProcesses() as busy:
        busy.set(3)
        third = busy.processes[2]
        busy.set(2)
        first, second = busy.processes
        assert (first.poll(), second.poll(), third.poll()) == (None, None, -9)
        assert os.getsid(first.pid) == os.getsid(0)  # its niceness is the bench's
        eventually(lambda: all(int(stat(p.pid)[11]) for p in busy.processes))  # ticks of CPU time
        first.kill()
        first.wait()
        with pytest.raises(InputError):
            busy.set(2)
        busy.processes.remove(first)
    assert second.poll() == -9


def _hangs(n: int) -> tuple[int, Callable[[int], None]]:
    """A bench's process that has busy ones."""
    (busy := BusyProcesses()).set(n)
    return busy.processes[0].pid, busy.set


def test_busy_processes_end_with_a_bench_that_is_killed() -> None:
    with WorkerProcess(_hangs, 1) as bench:
        assert stat(bench.about)[0] != "Z"
    eventually(lambda: stat(bench.about)[0] == "Z")


def _answers(task: str) -> tuple[set[int], Callable[[str], str]]:
    """A worker of these tests."""
    if task == "refuse":
        raise ServeError("no server", path="here")
    return os.sched_getaffinity(0), lambda request: sys.exit(3) if request == "end" else request + task


def test_a_worker_answers_on_one_core_and_its_failures_are_errors() -> None:
    before = os.sched_getaffinity(0)
    with one_core():
        worker = WorkerProcess(_answers, "!")
    with worker:
        assert (worker.about, os.sched_getaffinity(0)) == ({max(before)}, before)
        assert worker.call("Yes") == "Yes!"
        with pytest.raises(InputError):
            worker.call("end")
    with pytest.raises(ServeError) as error:
        WorkerProcess(_answers, "refuse")
    assert error.value.path == "here"
    with pytest.raises(InputError):
        run_process((sys.executable, "-c", "raise SystemExit('no index here')"), lambda out: {})


def test_a_server_process_has_a_url_and_ends(tmp_path: Path) -> None:
    def start(port: int, program: str = SERVES) -> ServerProcess:
        return ServerProcess([sys.executable, "-c", program, str(port)], tmp_path / "log")

    with start(1) as first:
        assert first.url == "http://here:1"
        assert 30 < first.memory_mb < 1000
        assert first.stop() == 3
    with pytest.raises(KeyError), start(2) as second:
        raise KeyError
    assert not Path(f"/proc/{second.pid}").exists()
    with pytest.raises(ServeError) as error:
        start(3, "raise SystemExit(5)")
    assert error.value.path == str(tmp_path / "log")


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


def test_a_proxy_forwards_delays_once_holds_and_closes_and_its_process_ends() -> None:
    sent = bytes(range(256)) * 4 * KB
    with echo() as port:
        with ProxyProcess(port) as proxy, dial(proxy) as line:
            assert echoed(line, sent)[0] == sent
            assert proxy.n_bytes == len(sent)
            proxy.set(LinkConditions(delay_s=0.125))
            assert echoed(line, b"ping")[1] >= 0.25
            # Three hundred pieces that each waited would need 75 seconds.
            assert 0.25 <= echoed(line, bytes(64 * KB * 300))[1] < 60
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


def test_a_rate_is_that_of_all_connections_together_and_may_follow_a_trace() -> None:
    sent, rate = bytes(256 * KB), 2_000_000.0
    with echo() as port, Proxy(port) as proxy, dial(proxy) as one, dial(proxy) as other:
        proxy.conditions = LinkConditions(bytes_per_s=rate)
        with ThreadPoolExecutor(2) as pool:
            seconds = pool.map(lambda line: echoed(line, sent)[1], (one, other))
        assert max(seconds) >= 2 * len(sent) / rate - 0.01  # what a burst may save
    assert network(50.0, 1.0) == LinkConditions(bytes_per_s=125e6, delay_s=0.025)
    down = changing(0)["down"]
    assert [rate_at(down, at) / GBIT for at in (0.0, 0.049, 0.051, 1e9)] == [3, 3, 0.1, 0.1]
    assert changing(1) == changing(1) != changing(2)
