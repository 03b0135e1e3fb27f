"""Behind a proxy: streams, path prefixes, request ids, the log, and a shutdown that load balancers can see."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fastapi
import httpx
import pytest

from blendserve.config import ServeConfig
from blendserve.errors import ConfigError
from blendserve.serve import app as application
from blendserve.serve.middleware import JsonFormatter, TextFormatter
from tests.support.engines import QUESTIONS
from tests.support.http import KEY, MODEL, OWN, Client, Server, asked, bearer, certificate, events, serving
from tests.support.waiting import eventually

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "proxy.md"
PLAIN = """
pid nginx.pid;
error_log nginx.log;
events {}
http {
    access_log off;
    client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4; scgi_temp_path t5;
    server { listen 127.0.0.1:8443; location / { proxy_pass http://127.0.0.1:8000; } }
}
"""
TRACE = "0af7651916cd43dd8448eb211c80319c"
HELD_S = 20.0  # after which a token is written although nobody has read the one before


def document(name: str) -> str:
    """A file that the page writes."""
    found = re.search(
        rf"^cat > {re.escape(name)} <<'END'\n(.*?)^END$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert found
    return found[1]


@contextmanager
def nginx(folder: Path, text: str, server: Server) -> Iterator[str]:
    """nginx with these settings in front of a server -> its address."""
    if not (program := shutil.which("nginx", path=f"/usr/sbin:/usr/local/bin:{os.environ['PATH']}")):
        pytest.skip("no nginx here")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{server.listener.port}").replace("8443", str(port))
    (folder / "nginx.conf").write_text(f"daemon off;\nmaster_process off;\n{text}")
    process = subprocess.Popen([program, "-p", folder, "-c", "nginx.conf", "-e", folder / "nginx.log"])

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        eventually(listens)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_a_stream_passes_nginx_token_by_token(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's thread writes a token when the client has read a piece of the stream, and not sooner."""
    pieces, n_late = threading.Semaphore(1), 0
    observer: Any = server.backend.metrics
    count = observer.token

    def gated(*arguments: Any) -> None:
        nonlocal n_late
        count(*arguments)
        n_late += not pieces.acquire(timeout=HELD_S if not n_late else 0)

    monkeypatch.setattr(observer, "token", gated)
    body = {"model": MODEL, "messages": asked(), "documents": OWN[:1], "max_tokens": 12, "stream": True}
    received = list[bytes]()
    with (
        nginx(tmp_path, PLAIN, server) as address,
        httpx.Client(base_url=f"http://{address}", timeout=300) as http,
        http.stream("POST", "/v1/chat/completions", json=body, headers=bearer(KEY)) as stream,
    ):
        for piece in stream.iter_raw():
            received.append(piece)
            pieces.release()
    assert b"".join(received).endswith(b"[DONE]\n\n")
    assert n_late == 0
    assert len(received) >= 12


def test_the_files_of_the_page_run(tmp_path: Path) -> None:
    """TLS and a prefix, which the proxy keeps; the client's address and request id arrive."""
    made, key = certificate(tmp_path, "DNS:localhost")
    made.rename(tmp_path / "tls.crt")
    key.rename(tmp_path / "tls.key")
    settings: dict[str, Any] = {"root_path": "/llm", "proxies": ("127.0.0.1",), "api_key": KEY}
    text = document("nginx.conf").replace("access_log off;", PLAIN.splitlines()[6])
    trust = ssl.create_default_context(cafile=tmp_path / "tls.crt")
    with serving(tmp_path / "index", **settings) as server, nginx(tmp_path, text, server) as address:
        port = address.rpartition(":")[2]
        with httpx.Client(base_url=f"https://localhost:{port}/llm", verify=trust, timeout=300) as http:
            models = http.get("/v1/models", headers=bearer(KEY))
            assert (models.status_code, len(models.headers["X-Request-Id"])) == (200, 32)
            assert http.get("/v1/models").status_code == 401
            page = http.get("/")
            scripts = re.findall(r'src="([^"]+)"', page.text)
            assert {http.get(f"/{script}").status_code for script in scripts} == {200}
            described = http.get("/openapi.json").json()
            assert described["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("prefix", ["", "/llm"], ids=["removed", "kept"])
def test_a_prefix_is_kept_or_removed_by_the_proxy(tmp_path: Path, prefix: str) -> None:
    with serving(tmp_path, root_path="/llm", has_index=False) as server:
        answer = server.post(
            f"{prefix}/v1/chat/completions", {"model": MODEL, "messages": asked(), "max_tokens": 1}
        )
        assert answer.status_code == 200
        assert server.get(f"{prefix}/").headers["Content-Type"].startswith("text/html")
        assert server.post(f"{prefix}/v1/messages", {}).json()["type"] == "error"  # Anthropic's form
        assert server.get(f"{prefix}/llmx").status_code == 404


@pytest.mark.parametrize("path", ["llm", "/llm/", "/"])
def test_a_prefix_has_one_form(path: str) -> None:
    with pytest.raises(ConfigError):
        ServeConfig(root_path=path)


def test_the_unit_is_valid(tmp_path: Path) -> None:
    if not (program := shutil.which("systemd-analyze")):
        pytest.skip("no systemd-analyze here")
    unit = document("blendserve.service").replace("/opt/blendserve/bin/blendserve", sys.executable)
    for name, text, is_valid in (
        ("blendserve.service", unit, True),
        ("broken.service", "[Service]\n", False),
    ):
        (tmp_path / name).write_text(text)
        done = subprocess.run([program, "verify", tmp_path / name], capture_output=True, text=True)
        said = [line for line in (done.stdout + done.stderr).splitlines() if name in line]
        assert (not said) == is_valid, said


def test_a_drained_server_says_so_until_its_requests_are_done(tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": asked(), "max_tokens": 3, "stream": True}
    with serving(tmp_path, has_index=False) as server, server.busy() as release:
        with server.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            server.listener.signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{server.url}/ready").is_error)
            ready = httpx.get(f"{server.url}/ready")
            refused = httpx.post(f"{server.url}/v1/chat/completions", json=body)
            for answer in (ready, refused):
                assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
            assert httpx.head(f"{server.url}/health").status_code == 200
            release.set()
            assert events([*stream.iter_lines()])[-1]["choices"][0]["finish_reason"] == "length"
        eventually(lambda: is_closed(server))


def is_closed(server: Server) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", server.listener.port)) != 0


Logged = Callable[[logging.Formatter], pytest.LogCaptureFixture]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[Logged]:
    """What the server would write to stderr in a format."""
    before = caplog.handler.formatter
    caplog.set_level(logging.INFO, "blendserve.access")

    def capture(formatter: logging.Formatter) -> pytest.LogCaptureFixture:
        caplog.handler.setFormatter(formatter)
        return caplog

    yield capture
    caplog.handler.setFormatter(before)


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [("a-b_c.1:2/3+4=5@6", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("\u00e9", False)],
)
def test_a_request_keeps_its_id(client: Client, sent: str, is_kept: bool) -> None:
    headers = httpx.Headers({"X-Request-Id": sent, **bearer(client.key)}, encoding="utf-8")
    answer = client.http.get("/v1/models", headers=headers)
    assert (answer.headers["X-Request-Id"] == sent) == is_kept
    assert len(answer.headers["X-Request-Id"]) == (len(sent) if is_kept else 32)


@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_an_answer(client: Client, logged: Logged, stream: bool) -> None:
    log = logged(JsonFormatter())
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", **bearer(client.key)}
    body = {"question": QUESTIONS[0], "passages": OWN[:1], "max_tokens": 2, "stream": stream}
    client.http.post("/v1/rag/query?secret=1", json=body, headers=headers)
    eventually(lambda: log.text)
    line = json.loads(log.text)
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/rag/query", 200)
    assert (line["model"], line["trace_id"], line["completion_tokens"]) == ("public", TRACE, 2)
    assert 0 <= line["cached_tokens"] <= line["prompt_tokens"]
    assert line["ms"] > 0


def test_a_line_of_text_cannot_be_forged(client: Client, logged: Logged) -> None:
    log = logged(TextFormatter())
    client.http.get("/nothing%0Astatus=200", headers={"X-Request-Id": "kim-1", "traceparent": "00-no"})
    eventually(lambda: log.text)
    (line,) = log.text.splitlines()
    assert "request=kim-1 method=GET" in line
    assert ' path="/nothing%0Astatus=200" status=404 ' in line
    assert "trace_id" not in line
    log.clear()
    logging.getLogger("blendserve.access").warning("two\nlines")
    assert log.text.splitlines() == [log.text.strip()]
    assert r'message="two\nlines"' in log.text


def test_spans_continue_the_clients_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instrumentation = pytest.importorskip("opentelemetry.instrumentation.fastapi")
    export: Any = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    trace: Any = pytest.importorskip("opentelemetry.sdk.trace")
    exporter, provider = memory.InMemorySpanExporter(), trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    instrumentor = instrumentation.FastAPIInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    # `opentelemetry-instrument` does this before the program imports FastAPI
    monkeypatch.setattr(application, "FastAPI", fastapi.FastAPI)
    try:
        with serving(tmp_path, has_index=False) as server:
            body = {"model": MODEL, "messages": asked(), "max_tokens": 1}
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            assert server.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        spans = exporter.get_finished_spans()
    finally:
        instrumentor.uninstrument()
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    assert "POST /v1/chat/completions" in {span.name for span in spans}
