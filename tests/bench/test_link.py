"""The link bench and its network: what a network bounds from below, and a run of the bench."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blendserve.bench.config import LinkConfig
from blendserve.bench.link import Link, Weather
from blendserve.bench.remote import weather
from blendserve.bench.servers import binary
from blendserve.cli import main
from blendserve.errors import ConfigError

KB = 1 << 10


@contextmanager
def echo() -> Iterator[int]:
    """A server that sends back what it gets -> its port."""

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


def dial(link: Link) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(link.url.rpartition(":")[2])), timeout=300)


def there_and_back(line: socket.socket, sent: bytes) -> tuple[bytes, float]:
    """What came back, and the seconds that it took."""
    start, got = time.monotonic(), bytearray()
    threading.Thread(target=line.sendall, args=(sent,), daemon=True).start()
    while len(got) < len(sent) and (piece := line.recv(64 * KB)):
        got += piece
    return bytes(got), time.monotonic() - start


def test_a_link_gives_what_it_got_and_counts_it() -> None:
    sent = bytes(range(256)) * 4 * KB
    with echo() as port, Link(port) as link, dial(link) as line:
        assert there_and_back(line, sent)[0] == sent
        assert link.up.n_bytes == link.down.n_bytes == len(sent)


def test_a_round_trip_is_waited_for_once_however_much_is_sent() -> None:
    """A thousand pieces that each waited would take four minutes."""
    sent = bytes(64 * KB * 1_000)
    with echo() as port, Link(port) as link, dial(link) as line:
        link.weather = Weather(delay_s=0.125)
        assert there_and_back(line, b"ping")[1] >= 0.25
        assert 0.25 <= there_and_back(line, sent)[1] < 60


def test_a_rate_is_that_of_all_connections_together() -> None:
    sent, rate = bytes(256 * KB), 2_000_000.0
    with echo() as port, Link(port) as link, dial(link) as one, dial(link) as other:
        link.weather = Weather(bytes_per_s=rate)
        took: list[float] = []
        asking = [
            threading.Thread(target=lambda line=line: took.append(there_and_back(line, sent)[1]))
            for line in (one, other)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        assert max(took) >= 2 * len(sent) / rate - 0.01  # what a burst may save


def test_a_cut_ends_both_sides_after_so_many_bytes() -> None:
    with echo() as port, Link(port) as link, dial(link) as line:
        link.weather = Weather(cut_after=1_000, delay_s=0.01)
        assert len(there_and_back(line, bytes(10 * KB))[0]) == 1_000


def test_networks_are_told_in_their_own_units() -> None:
    assert weather(50.0, 1.0) == Weather(bytes_per_s=125e6, delay_s=0.025)


def test_a_word_that_is_no_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        LinkConfig(codecs=("int9",)).words  # noqa: B018
    assert LinkConfig().words == ("raw", "int8", "predict@1")


@pytest.mark.skipif(binary() is None, reason="there is no valkey-server here")
def test_the_bench_tells_what_each_network_costs(
    tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", tiny, "--dtype", "float32", "--chunks", "3", "--chunk-tokens", "40"]
    words += [
        "--suffix-tokens",
        "30",
        "--repeats",
        "1",
        *("--in-flight", "1", "--requests", "1"),
        "--codecs",
        "raw,int8",
        "--round-trips-ms",
        "0,100",
        "--rates-gbit",
        "0.02",
    ]
    monkeypatch.setattr(sys, "argv", ["blendserve"])
    monkeypatch.setattr(
        "blendserve.blend.slow_link.Link.probe", lambda *_: None
    )  # its bytes are no request's
    with pytest.raises(SystemExit) as end:
        main(["bench", "link", *words])
    out, errors = capsys.readouterr()
    assert not end.value.code, errors
    figures = json.loads(out.strip().splitlines()[-1])
    near, far = figures["cells"]
    for cell in (near, far):
        for found in cell["codecs"].values():
            assert found["ttft"]["least"] >= found["waited"]["least"]
            assert found["waited"]["least"] >= lower_bound(found, cell)
            assert min(found["auto"]["ttft"]["least"], found["auto"]["first"]) > 0
    for trips in figures["answered_a_second"].values():
        assert set(trips) == {"0.0", "100.0"}
        assert trips["0.0"]["of_nearest"]["median"] == 1.0
        assert trips["100.0"]["rate"]["least"] > 0
    assert near["codecs"]["raw"]["bytes"] > 1.5 * near["codecs"]["int8"]["bytes"]
    assert "int8" in out
    assert "deadline 60 s" in " ".join(out.split())


def lower_bound(found: dict[str, Any], cell: dict[str, Any]) -> float:
    """Seconds that no request can beat: its bytes, but for what a burst may save, and a round trip."""
    return float(found["bytes"] * 8 / (cell["rate_gbit"] * 1e9) - 0.01 + cell["round_trip_ms"] / 1e3)
