"""The toy engine behind HTTP: a server in this process or as its own process, and clients with one API key each."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from blendserve.bench.server_process import LISTENING, ServerProcess
from blendserve.cli import main
from blendserve.config import ServeConfig
from blendserve.core import Document, Passage, Steps
from blendserve.engine.documents import Collections
from blendserve.engine.engine import Engine
from blendserve.engine.prompt import PromptBuilder
from blendserve.models.loader import LoadedModel
from blendserve.retrieve import TokenCounter, VectorIndex
from blendserve.retrieve.encoder import Window
from blendserve.serve.app import create_engine_app
from blendserve.serve.engine_client import LocalEngineClient
from blendserve.serve.keys import KeyFile, Tenant
from blendserve.serve.server import HttpServer, run
from blendserve.store import LMDBStore
from tests.support.engines import PASSAGES, QUESTIONS, toy_engine, toy_model
from tests.support.forked import process
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "tiny"
KEY = "sk-one-key"  # of tests/serve's server: may do everything in the default namespace
ORIGIN = "http://localhost:3000"  # whose pages may call it
PATIENT_S = 180.0  # a busy machine may stop for a while
SEPARATOR = " # # "
CHUNK_TOKENS = 32
OWN = [{"text": p.text, "title": p.title} for p in PASSAGES]
DOCUMENTS = [Document(p.text, p.title, p.title.lower()) for p in PASSAGES]


class WordEmbedder:
    """Embeds a text by its words: no model to load."""

    name, fingerprint, dimension, max_tokens = "words", "words-1", 64, 10_000

    def cut(self, passages: Sequence[Passage]) -> Steps[list[list[Window]]]:
        yield
        return [[Window(f"{p.title}\n{p.text}", np.zeros(1, np.int32))] for p in passages]

    def encode(self, windows: Sequence[Window], *_: Any) -> Steps[np.ndarray]:
        yield
        return np.stack([self.embed_question(window.text) for window in windows])

    def embed_question(self, question: str) -> np.ndarray:
        vector = np.full(self.dimension, 1e-3, np.float32)
        for word in question.lower().split():
            vector[zlib.crc32(word.strip(".,;?").encode()) % self.dimension] += 1
        return np.asarray(vector / np.linalg.norm(vector))


def index(folder: Path, prompts: PromptBuilder, documents: Sequence[Document]) -> VectorIndex:
    """The index in a folder; if there is none, a new one of these documents."""
    model, embedder = toy_model(), cast("Any", WordEmbedder())
    tokens = TokenCounter(model.name, model.fingerprint, lambda passage: len(prompts.chunk(passage)))
    if folder.exists():
        return VectorIndex.open(folder, embedder, tokens)
    made = VectorIndex.create(folder, embedder, tokens, chunk_tokens=64)
    made.add(documents)
    return made


def library(folder: Path, engine: Engine) -> Collections:
    """Collections a and b, of every other document."""
    found = {name: index(folder / name, engine.prompts, DOCUMENTS[i::2]) for i, name in enumerate("ab")}
    engine.index = found["a"]
    return Collections(found)


class Client:
    """Requests with one key."""

    def __init__(self, url: str, http: httpx.Client, key: str = "", namespace: str = "") -> None:
        self.url, self.http, self.key, self.namespace = url, http, key, namespace

    def with_key(self, key: str, namespace: str = "") -> Client:
        return Client(self.url, self.http, key, namespace)

    @cached_property
    def openai(self) -> OpenAI:
        """The official client."""
        import openai  # not in the processes that only need the toy engine

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body, headers=bearer(self.key))

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path, headers=bearer(self.key))

    def delete(self, path: str, **parameters: str) -> httpx.Response:
        return self.http.delete(path, params=parameters, headers=bearer(self.key))

    @contextmanager
    def sent(self, path: str, *headers: str, body: bytes = b"") -> Iterator[socket.socket]:
        """A connection with a POST request whose body may be incomplete."""
        host, port = self.url.removeprefix("http://").split(":")
        lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *headers]
        lines += [f"{name}: {value}" for name, value in bearer(self.key).items()]
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            yield connection

    def job(self, path: str, body: Any) -> dict[str, Any]:
        """Start a job -> its final state."""
        started = self.post(path, body)
        assert started.status_code == 202, started.text

        def ended() -> dict[str, Any]:
            job: dict[str, Any] = self.get(f"/v1/jobs/{started.json()['id']}").json()
            return job if job["state"] != "running" else {}

        return eventually(ended)

    def ask(self, question: str = QUESTIONS[0], **fields: Any) -> dict[str, Any]:
        """The answer of POST /v1/rag/query."""
        response = self.post("/v1/rag/query", {"question": question, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, without [DONE]."""
        return events(self.post(path, {**body, "stream": True}).text.splitlines())

    def chat(self, message: Any = QUESTIONS[0], **fields: Any) -> Any:
        """An answer through OpenAI's client, which takes fields of ours as `extra_body`."""
        body = {name: fields.pop(name) for name in ("documents", "x_blendserve") if name in fields}
        messages = asked(message) if isinstance(message, str) else message
        create: Any = self.openai.chat.completions.create
        return create(model=MODEL, messages=messages, extra_body=body, **fields)

    def warm(self, passages: Sequence[dict[str, str]] = OWN) -> dict[str, Any]:
        """Compute and pin; it also waits for chunks that earlier requests write back."""
        return self.job("/v1/cache/warm", {"passages": passages})


def _once(call: Callable[[], object]) -> Steps[None]:
    yield
    call()


class Server(Client):
    """A server on a real socket of this process; `serve.port` counts if it is not the default one."""

    def __init__(
        self,
        folder: Path,
        serve: ServeConfig,
        model: LoadedModel | None = None,
        has_index: bool = True,
        **changes: Any,
    ) -> None:
        """model: in place of the toy model. changes: of sections of the engine's settings."""
        self.folder, self.serve = folder, serve
        self.engine = toy_engine(model=model, **changes)
        collections = library(folder, self.engine) if has_index else Collections({})
        self.backend = LocalEngineClient(self.engine, collections, serve)
        port = 0 if serve.port == ServeConfig().port else serve.port
        self.listener = Listener(create_engine_app(self.backend), port)
        super().__init__(self.listener.url, httpx.Client(base_url=self.listener.url, timeout=300))
        self._tenants, self._numbers = list[Tenant](), count()

    def tenant(self, **rights: Any) -> Client:
        """A new tenant with its own key and, if `rights` name no other, its own namespace."""
        assert self.serve.keys is not None
        name = f"tenant-{next(self._numbers)}"
        made = Tenant(**{"name": name, "namespace": name, **rights})
        self._tenants.append(made)
        return self.with_key(KeyFile(self.serve.keys).create(made), made.namespace)

    def forget_tenants(self) -> None:
        """Wait for all requests, jobs and write-backs; then drop all KV."""
        eventually(lambda: self.is_idle)
        for name in {"", "api-key", *(tenant.name for tenant in self._tenants)}:
            written = threading.Event()
            self.backend.scheduler.submit_background(_once(written.set), name)
            assert written.wait(PATIENT_S)
        self.engine.store.delete(list(self.engine.store.keys(None)))
        self._tenants.clear()

    @property
    def is_idle(self) -> bool:
        """No request is queued or answered, no job runs, and no loaded chunk is kept for others."""
        namespaces = {"", *(tenant.namespace for tenant in self._tenants)}
        jobs = (job for name in namespaces for job in self.backend.jobs.of(name))
        has_requests = self.backend.scheduler.load != (0, 0)
        has_chunks = self.backend.batch.fetcher.copies.shared.n_bytes > 0
        return not (has_requests or has_chunks or any(job.state == "running" for job in jobs))

    def sample(self, name: str, **labels: str) -> float:
        """One value of /metrics."""
        return self.backend.metrics.registry.get_sample_value(f"blendserve_{name}", labels) or 0.0

    @contextmanager
    def busy(self) -> Iterator[threading.Event]:
        """The model's thread is occupied until the event is set, or the block ends."""
        begun, release = threading.Event(), threading.Event()

        def task() -> None:
            begun.set()
            release.wait(PATIENT_S)

        self.backend.scheduler.submit_background(_once(task))
        assert begun.wait(PATIENT_S)
        try:
            yield release
        finally:
            release.set()

    def wait_for_load(self, waiting: int) -> None:
        """Until this number of requests is queued."""
        eventually(lambda: self.backend.scheduler.load[0] == waiting)

    def close(self) -> None:
        self.http.close()
        self.listener.close()
        self.engine.close()


class Listener:
    """An application served by a thread, as commands serve it."""

    def __init__(self, app: FastAPI, port: int = 0, **options: Any) -> None:
        """options: of uvicorn."""
        self._uvicorn = HttpServer(app, app.state.backend, port=port, **options)
        self._thread = threading.Thread(target=self._uvicorn.run)
        self._thread.start()
        eventually(lambda: self._uvicorn.started)
        self.port: int = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        """As the process would receive it."""
        self._uvicorn.handle_exit(number, None)

    def close(self, force: bool = False) -> None:
        """force: without waiting for responses."""
        self._uvicorn.should_exit, self._uvicorn.force_exit = True, force
        self._thread.join()


def events(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON of a stream's lines."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def asked(content: Any = QUESTIONS[0], **fields: Any) -> list[Any]:
    """The messages of a chat."""
    return [{"role": "user", "content": content, **fields}]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def certificate(folder: Path, name: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate of a name, by default 127.0.0.1, that signs itself, and its key."""
    stem = name.rpartition(":")[2]
    made, key = folder / f"{stem}.pem", folder / f"{stem}.key"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext"
    command += f" subjectAltName={name}"
    try:
        subprocess.run([*command.split(), "-keyout", key, "-out", made], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl here to make a certificate with")
    return made, key


def run_logged(_: Connection, log: Path, serve: Callable[..., object], *args: Any) -> None:
    """In its own process: run `serve(*args)`, with its output in `log`."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    serve(*args)


def run_toy_server(folder: Path) -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with toy_engine(LMDBStore(folder / "kv", 2**27)) as engine:
        run(engine, library(folder, engine), ServeConfig(port=0, drain_s=20))


class ForkedServer(ExitStack):
    """A server as its own process, which starts without imports; has the methods of `ServerProcess`."""

    def __init__(self, log: Path, serve: Callable[..., object], *args: Any) -> None:
        super().__init__()
        log.write_bytes(b"")
        self._process, _ = self.enter_context(process(run_logged, log, serve, *args))
        self.pid = self._process.pid
        found = eventually(lambda: LISTENING.findall(log.read_bytes()))
        self.url: str = found[0].decode()

    memory_mb = ServerProcess.memory_mb

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def stop(self) -> int | None:
        self.terminate()
        return self.wait()


class ToyServer(ForkedServer):
    """The toy engine, with its store on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "log", run_toy_server, folder)


class CommandServer(ForkedServer):
    """A command `python -m blendserve serve ...`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        super().__init__(log, main, command[3:])


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Server]:
    """A server with settings of its own, for a test of these settings; `engine=` changes the engine's.

    Without an index (`has_index=False`) it has no collections; `model` takes the place of the toy model.
    """
    changes = settings.pop("engine", {})
    changes |= {name: settings.pop(name) for name in ("model", "has_index") if name in settings}
    server = Server(folder, ServeConfig(**settings), **changes)
    try:
        yield server
    finally:
        server.close()
