"""The toy engine behind HTTP: a server in this process or as its own process, and clients with one API key each."""

from __future__ import annotations

import json
import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import uvicorn

from blendserve.config import BlendConfig, Config, DecodeConfig, PromptConfig, StoreConfig, changed
from blendserve.core import Document, Passage
from blendserve.engine.engine import Engine
from blendserve.engine.library import Library
from blendserve.engine.prompt import PromptBuilder
from blendserve.models.loader import Reader
from blendserve.models.toy import toy_reader
from blendserve.retrieve import VectorIndex
from blendserve.serve.app import make_app
from blendserve.serve.child import Child
from blendserve.serve.config import ServeConfig
from blendserve.serve.keys import KeyFile, Tenant
from blendserve.serve.running import run
from blendserve.serve.service import Service
from blendserve.store import LMDBStore, MemoryStore
from tests.support.forked import process
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "tiny"
KEY = "sk-one-key"  # of the shared server: may do everything in the default namespace
ORIGIN = "http://localhost:3000"  # whose pages may call the shared server
SEPARATOR = " # # "
CHUNK_TOKENS = 32
CONFIG = Config(
    prompt=PromptConfig(system="Be brief.", instruction="Read."),
    store=StoreConfig(kind="memory"),
    blend=BlendConfig(method="blend"),
    decode=DecodeConfig(max_new_tokens=12),
)
PASSAGES = tuple(
    Passage(text, title)
    for title, text in (
        ("Cats", "The cat sat on the mat and looked at the moon, which was round."),
        ("Dogs", "A dog barked at the mailman all morning long, and then it slept."),
        ("Snow", "Snow fell on the hills, and nobody came to the house by the river."),
        ("Bread", "Bread is made of flour, water and salt; it rises when yeast is at work."),
        ("Ships", "The ship left the harbour with nine sailors and a load of timber."),
        ("Clocks", "A clock that has stopped is right twice a day, or so they say."),
    )
)
QUESTIONS = (
    "Who sat on the mat?",
    "What did the dog do in the morning?",
    "Where did the snow fall, and who came?",
    "What is bread made of?",
)
OWN = [{"text": p.text, "title": p.title} for p in PASSAGES]
DOCUMENTS = [Document(p.text, p.title, p.title.lower()) for p in PASSAGES]


@cache
def reader() -> Reader:
    return toy_reader(1024)


class WordEmbedder:
    """Embeds a text by its words: no model to load."""

    name, fingerprint, dimension, max_tokens, dtype = "words", "words-1", 64, 10_000, "float32"

    def let_others(self, go_between: Callable[[], None]) -> None:
        """An embedding takes no time."""

    def embed_passages(self, passages: Sequence[Passage], *_: Any) -> tuple[np.ndarray, list[int]]:
        vectors = [self.embed_question(f"{p.title}\n{p.text}") for p in passages]
        return np.stack(vectors), [1] * len(passages)

    def embed_question(self, question: str) -> np.ndarray:
        vector = np.full(self.dimension, 1e-3, np.float32)
        for word in question.lower().split():
            vector[zlib.crc32(word.strip(".,;?").encode()) % self.dimension] += 1
        return np.asarray(vector / np.linalg.norm(vector))


def index(folder: Path, prompts: PromptBuilder, documents: Sequence[Document]) -> VectorIndex:
    """The index in a folder; if there is none, a new one of these documents."""
    of_reader: Any = {
        "reader": reader().name,
        "reader_fingerprint": reader().fingerprint,
        "count": lambda passage: len(prompts.chunk(passage)),
    }
    embedder: Any = WordEmbedder()
    if folder.exists():
        return VectorIndex.open(folder, embedder, **of_reader)
    made = VectorIndex.create(folder, embedder, chunk_tokens=64, **of_reader)
    made.add(documents)
    made.save()
    return made


def library(folder: Path, engine: Engine) -> Library:
    """Collections a and b, of every other document."""
    found = {name: index(folder / name, engine.prompts, DOCUMENTS[i::2]) for i, name in enumerate("ab")}
    engine.index = found["a"]
    return Library(found)


class Server:
    """A server on a real socket of this process; `serve.port` counts if it is not the default one."""

    def __init__(self, folder: Path, serve: ServeConfig, **changes: Any) -> None:
        """changes: sections of the engine's settings."""
        self.folder, self.serve = folder, serve
        self.engine = Engine(changed(CONFIG, **changes), reader(), MemoryStore(2**30))
        self.service = Service(self.engine, library(folder, self.engine), serve)
        self.listener = Listener(
            make_app(self.service), 0 if serve.port == ServeConfig().port else serve.port
        )
        self.url, self.http = self.listener.url, httpx.Client(base_url=self.listener.url, timeout=300)
        self._tenants, self._numbers = list[Tenant](), count()

    def client(self, key: str = "none") -> OpenAI:
        import openai  # not in the processes that only need the toy engine

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, body: Any, key: str = "") -> httpx.Response:
        return self.http.post(path, json=body, headers=bearer(key))

    def get(self, path: str, key: str = "") -> httpx.Response:
        return self.http.get(path, headers=bearer(key))

    def job(self, started: httpx.Response, key: str = "") -> dict[str, Any]:
        """The final state of a job."""
        assert started.status_code == 202, started.text
        path = f"/v1/jobs/{started.json()['id']}"

        def ended() -> dict[str, Any] | None:
            job: dict[str, Any] = self.get(path, key).json()
            return job if job["state"] != "running" else None

        job = eventually(ended)
        assert job is not None
        return job

    def tenant(self, **rights: Any) -> TenantClient:
        """A new tenant with its own key and, if `rights` name no other, its own namespace."""
        assert self.serve.keys is not None
        name = f"tenant-{next(self._numbers)}"
        made = Tenant(**{"name": name, "namespace": name, **rights})
        self._tenants.append(made)
        return TenantClient(self, KeyFile(self.serve.keys).create(made), made.namespace)

    def forget_tenants(self) -> None:
        """Wait for all requests, jobs and write-backs; then drop the KV of the tenants and of the default namespace."""
        eventually(lambda: self.is_idle)
        for name in {"", "api-key", *(tenant.name for tenant in self._tenants)}:
            written = threading.Event()
            self.service.scheduler.in_background(written.set, name)
            assert written.wait(30)
        for namespace in self.namespaces:
            for key in list(self.engine.store.keys(namespace)):
                self.engine.store.delete(key)
        self._tenants.clear()

    @property
    def namespaces(self) -> set[str]:
        return {"", *(tenant.namespace for tenant in self._tenants)}

    @property
    def is_idle(self) -> bool:
        """No request is queued or answered, no job runs, and no loaded chunk is kept for others."""
        jobs = (job for name in self.namespaces for job in self.service.jobs.of(name))
        running = any(job.state == "running" for job in jobs)
        return self.service.scheduler.load == (0, 0) and self.service.batch.store.n_bytes == 0 and not running

    def sample(self, name: str, **labels: str) -> float:
        """One value of /metrics."""
        return self.service.metrics.registry.get_sample_value(f"blendserve_{name}", labels) or 0.0

    @contextmanager
    def busy(self) -> Iterator[threading.Event]:
        """The model's thread is occupied until the event is set, or the block ends."""
        begun, release = threading.Event(), threading.Event()

        def task() -> None:
            begun.set()
            release.wait(30)

        self.service.scheduler.in_background(task)
        assert begun.wait(30)
        try:
            yield release
        finally:
            release.set()

    def wait_for_load(self, waiting: int) -> None:
        """Until so many requests are queued."""
        eventually(lambda: self.service.scheduler.load[0] == waiting)

    def close(self) -> None:
        self.http.close()
        self.listener.close()
        self.engine.close()


class Listener:
    """An application served by a thread."""

    def __init__(self, app: Any, port: int = 0) -> None:
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="on"))
        self._thread = threading.Thread(target=self._uvicorn.run)
        self._thread.start()
        eventually(lambda: self._uvicorn.started)
        self.url = f"http://127.0.0.1:{self._uvicorn.servers[0].sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join()


class TenantClient:
    """Requests with one key."""

    def __init__(self, server: Server, key: str = "", namespace: str = "") -> None:
        self.server, self.key, self.namespace = server, key, namespace

    @cached_property
    def openai(self) -> OpenAI:
        """The official client."""
        return self.server.client(self.key)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.server.post(path, body, self.key)

    def get(self, path: str) -> httpx.Response:
        return self.server.get(path, self.key)

    def delete(self, path: str, **parameters: str) -> httpx.Response:
        return self.server.http.delete(path, params=parameters, headers=bearer(self.key))

    def job(self, path: str, body: Any) -> dict[str, Any]:
        """Start a job -> its final state."""
        return self.server.job(self.post(path, body), self.key)

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
        extra = {name: fields.pop(name) for name in ("documents", "x_blendserve") if name in fields}
        messages = [{"role": "user", "content": message}] if isinstance(message, str) else message
        body = {**extra, **fields.pop("extra_body", {})}
        create: Any = self.openai.chat.completions.create
        return create(model=MODEL, messages=messages, extra_body=body, **fields)

    def warm(self, passages: Sequence[dict[str, str]] = OWN) -> dict[str, Any]:
        """Compute and pin; it also waits for chunks that earlier requests write back."""
        return self.job("/v1/cache/warm", {"passages": passages})


def events(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON of a stream's lines."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def run_toy_server(line: Connection, folder: Path) -> None:
    """In its own process: sends its address; appends its output to `folder`/log."""
    with (folder / "log").open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with Engine(CONFIG, reader(), LMDBStore(folder / "kv", 2**27)) as engine:
        engine.precompute([])  # the prefix
        run(engine, library(folder, engine), ServeConfig(port=0, drain_s=20), line.send)


class ToyServer:
    """A toy server as its own process with its store on disk; has the methods of `Child` (serve/child.py)."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._process, line = self._stack.enter_context(process(run_toy_server, folder))
        self.pid = self._process.pid
        self.url = str(line.recv()).removeprefix("Listening on ").strip()

    memory_mb = Child.memory_mb

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._process.kill()
        self._process.join()

    def wait(self) -> int | None:
        """Until it ends -> exit code."""
        self._process.join()
        return self._process.exitcode

    def stop(self) -> int | None:
        """SIGTERM, and wait -> exit code."""
        self.terminate()
        return self.wait()

    def __enter__(self) -> ToyServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Server]:
    """A server with settings of its own, for a test of these settings; `engine=` changes the engine's."""
    changes = settings.pop("engine", {})
    server = Server(folder, ServeConfig(**settings), **changes)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def shared_server(folder: Path) -> Iterator[Server]:
    """A server for many tests, each with its own tenant; at the end it must be as empty as at its start."""
    engine = {
        "prompt": {**CONFIG.prompt.model_dump(), "separator": SEPARATOR},
        "retrieve": {"chunk_tokens": CHUNK_TOKENS},
    }
    access: dict[str, Any] = {"keys": folder / "keys.json", "api_key": KEY, "cors_origins": (ORIGIN,)}
    limits = {"max_body_kb": 64, "slots": 2, "queue": 12}
    with serving(folder, served_model_name="public", engine=engine, **access, **limits) as made:
        yield made
        whole = made.get("/v1/cache/stats", KEY).json()["store"]
        documents = [made.get(f"/v1/documents?collection={name}", KEY).json()["total"] for name in "ab"]
    left = (whole["chunks"], whole["pins"], documents)
    assert left == (0, 0, [3, 3]), left
